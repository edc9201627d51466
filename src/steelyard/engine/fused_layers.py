"""Elementwise layers of a model, computed by one kernel each.

The forward methods of single modules are replaced, not their classes: other models of the process
keep theirs. Each kind is recognised by its parts and tried on random numbers first; one that
computes something else than the kernel keeps its own way.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Largest difference by the rounding of 16 bits, relative to the largest number.
_TOLERANCE = 2e-2
# Attribute of the cosines of an embedding whose rotations are a kernel.
_MARK = "rotated_by_kernel"


def fuse(base: nn.Module) -> list[str]:
    """Replace the forward methods of norms and gated layers; returns the names of the kinds."""
    if importlib.util.find_spec("triton") is None:
        return []
    fused: dict[type[nn.Module], bool] = {}
    rotary = [m for m in base.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    for module in rotary:
        fused[type(module)] = _fuse_rotary(module)
    for module in base.modules():
        forward = _kernel_of(module)
        if forward is None:
            continue
        kind = type(module)
        if kind not in fused:
            fused[kind] = _agrees(module, forward)
        if fused[kind]:
            module.forward = forward
    return sorted(kind.__name__ for kind, agrees in fused.items() if agrees)


def _kernel_of(module: Any) -> Callable[[Tensor], Tensor] | None:
    """Forward method by kernels of a module that looks like a kind which they know."""
    from steelyard.engine._triton_layers import RmsNorm, SwiGlu  # noqa: PLC0415 - needs Triton

    own: Callable[[Tensor], Tensor] = module.forward
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    has_weight = isinstance(getattr(module, "weight", None), Tensor)
    if type(module).__name__.endswith("RMSNorm") and isinstance(eps, float) and has_weight:
        device = module.weight.device.type

        # The weight is read at each call: a merged model may be moved to a CPU, without kernels.
        def norm(x: Tensor) -> Tensor:
            if x.device.type != device:
                return own(x)
            return _apply(RmsNorm, x, module.weight, eps)

        return norm
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    # Not those of several experts, whose matrices are parameters of three dimensions.
    is_gated = all(isinstance(getattr(module, part, None), nn.Module) for part in parts)
    if is_gated and "SiLU" in type(module.act_fn).__name__:
        device = next(module.parameters()).device.type

        def gated(x: Tensor) -> Tensor:
            if x.device.type != device:
                return own(x)
            products = _apply(SwiGlu, module.gate_proj(x), module.up_proj(x))
            output: Tensor = module.down_proj(products)
            return output

        return gated
    return None


def _fuse_rotary(embedding: Any) -> bool:
    """Rotate queries and keys by a kernel wherever an architecture reads this embedding.

    transformers rotates by a function of the architecture's module, which all its models share. It
    is replaced by one that takes the kernel only for angles that this embedding has computed, as a
    mark on them says: they travel with the arguments of layers, into recomputed ones too.
    """
    language: Any = sys.modules[type(embedding).__module__]
    own = getattr(language, "apply_rotary_pos_emb", None)
    # Gemma 3, for example, has frequencies for each kind of layer, under other names.
    like = getattr(embedding, "inv_freq", None)
    if own is None or like is None:
        return False
    rotate = own if hasattr(own, "rotates_without_kernel") else _with_kernel(own)
    forward, device = embedding.forward, like.device.type

    def marked(*args: Any, **kwargs: Any) -> Any:
        angles = forward(*args, **kwargs)
        setattr(angles[0], _MARK, angles[0].device.type == device)
        return angles

    generator = torch.Generator().manual_seed(0)
    width = 2 * like.numel()
    q, k = (torch.randn(1, n, 7, width, generator=generator).to(like) for n in (4, 2))
    try:
        cos, sin = marked(q, torch.arange(7, device=like.device)[None])
        with torch.no_grad():
            expected = rotate.rotates_without_kernel(q, k, cos, sin)
            rotated = rotate(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError):
        return False
    if not all(_is_close(*pair) for pair in zip(rotated, expected, strict=True)):
        return False
    embedding.forward = marked
    language.apply_rotary_pos_emb = rotate
    return True


def _with_kernel(own: Callable[..., Any]) -> Any:
    from steelyard.engine._triton_layers import Rotary  # noqa: PLC0415 - needs Triton

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        shape = (1, q.shape[-2], q.shape[-1])
        marked = getattr(cos, _MARK, False)
        if args or kwargs or not marked or q.shape[0] != 1 or cos.shape != shape:
            return own(q, k, cos, sin, *args, **kwargs)
        return _apply(Rotary, q, cos, sin), _apply(Rotary, k, cos, sin)

    rotates: Any = rotate
    rotates.rotates_without_kernel = own
    return rotates


def _apply(function: Any, *inputs: Any) -> Tensor:
    output: Tensor = function.apply(*inputs)
    return output


def _is_close(computed: Tensor, expected: Tensor, axes: tuple[int, ...] = ()) -> bool:
    """Compare the largest difference over some axes, by default over all, with the largest number.

    Of a norm each channel has a weight of its own: one that is large must not hide the others.
    """
    if computed.shape != expected.shape:
        return False
    difference, size = (computed - expected).abs().amax(axes), expected.abs().amax(axes)
    return bool((difference <= _TOLERANCE * size).all())


def _agrees(module: Any, forward: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a kernel computes what the module does, tried on random numbers."""
    is_norm = hasattr(module, "weight")
    weight = module.weight if is_norm else module.gate_proj.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 7, weight.shape[-1], generator=generator).to(weight)
    try:
        with torch.no_grad():
            expected, computed = module(x), forward(x)
    except (RuntimeError, TypeError, ValueError):
        return False
    return _is_close(computed, expected, (0, 1) if is_norm else ())
