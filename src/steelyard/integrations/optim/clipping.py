"""Clipping: all gradients together, or each output unit by the size of its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.errors import NonFiniteError, SpecError
from steelyard.integrations.optim.param_lists import Slot, batches, pieces, wide
from steelyard.integrations.optim.transform import Schedule, Strength, Transform, Where
from steelyard.spec import is_finite

_BLOCK = 1024
_norm: Callable[..., Tensor] = torch.linalg.vector_norm  # torch leaves it untyped


@dataclass(frozen=True, kw_only=True)
class _GlobalNorm(Transform):
    largest: Strength
    check_finite: bool

    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:  # noqa: ARG002
        largest = self.largest.at(step)
        gradients = [slot.gradient for slot in slots]
        norm = _global_norm(gradients)
        scale: float | Tensor
        if self.check_finite:
            size = norm.item()
            if not math.isfinite(size):
                raise NonFiniteError(
                    f"the norm of all gradients must be finite, got {size} at step {step} "
                    f"({self.name}); not finite: {_culprits(slots)}. Skip such a step, or pass "
                    "check_finite=False to let it through.",
                    term=self.name,
                    kind="nan" if math.isnan(size) else "inf",
                )
            if size <= largest:
                return
            scale = largest / size
        else:  # stays on the device, unread
            scale = (largest / norm).clamp(max=1.0)
        for (batch,) in batches(gradients):
            factor = scale.to(batch[0].device) if isinstance(scale, Tensor) else scale
            torch._foreach_mul_(batch, factor)


@dataclass(frozen=True, kw_only=True)
class _Adaptive(Transform):
    ratio: Strength
    eps: float

    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:  # noqa: ARG002
        ratio = self.ratio.at(step)
        for slot in slots:
            row = (_stored(slot), slot.gradient)
            for weights, gradient in pieces(*row) if slot.parameter.ndim > 1 else [row]:
                allowed = _unit_norms(weights).clamp_(min=self.eps).mul_(ratio)
                # A gradient of zero gives infinity here, and 1 in the end.
                scale = allowed.div_(_unit_norms(gradient)).clamp_(max=1.0)
                if scale.device.type != "cpu" or not bool((scale == 1.0).all()):
                    gradient.mul_(scale)


def clip_by_global_norm(
    max: float | Schedule,  # noqa: A002 - the name the design gives it
    *,
    check_finite: bool = True,
    where: Where | None = None,
) -> Transform:
    """Scale all gradients together so that their joint norm is at most `max`: g·min(max/‖g‖, 1).

    float16 and bfloat16 are summed in float32.

    Args:
        max: A number > 0, or a schedule `step -> float`.
        check_finite: Raise when the norm is NaN or infinite, before the optimizer's state is
            spoiled. This reads the norm, for which an accelerator is waited for; in return
            gradients within the limit are not touched. False lets NaN through, as torch does.
        where: Which parameters; the norm is theirs.

    Raises:
        SpecError: An argument breaks its rule.
        NonFiniteError: While stepping: the norm is not finite.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, clip_by_global_norm
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, 4.0])
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [clip_by_global_norm(2.5)]):
        ...     optimizer.step()
        >>> w.grad.tolist()
        [1.5, 2.0]
    """
    if not isinstance(check_finite, bool):
        raise SpecError(
            f"check_finite must be True or False, got {check_finite!r} (clip_by_global_norm)."
        )
    return _GlobalNorm(
        name="clip_by_global_norm",
        where=where,
        largest=Strength("max of clip_by_global_norm", max, above_zero=True),
        check_finite=check_finite,
    )


def adaptive_clip(
    c: float | Schedule, eps: float = 1e-3, *, where: Where | None = None
) -> Transform:
    """Clip each output unit by the size of its weights: g·min(c·max(‖w‖, eps)/‖g‖, 1).

    A unit is an element of the first axis, as torch's linear and convolution layers have it; a
    tensor of rank 0 or 1 is one unit.

    Args:
        c: A number > 0, or a schedule `step -> float`; 0.01 is usual.
        eps: The least norm of weights, so that units at zero can move.
        where: Which parameters.

    Raises:
        SpecError: An argument breaks its rule.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import adaptive_clip, attach
        >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [0.6, 0.8]]))
        >>> w.grad = torch.tensor([[0.3, 0.4], [0.3, 0.4]])
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [adaptive_clip(0.25)]):
        ...     optimizer.step()
        >>> [[round(x, 3) for x in row] for row in w.grad.tolist()]
        [[0.3, 0.4], [0.15, 0.2]]

    References:
        Brock et al. (2021), "High-performance large-scale image recognition without
        normalization", section 4.
    """
    if not is_finite(eps) or eps <= 0:
        raise SpecError(f"eps must be a finite number > 0, got {eps!r} (adaptive_clip).")
    return _Adaptive(
        name="adaptive_clip",
        where=where,
        ratio=Strength("c of adaptive_clip", c, above_zero=True),
        eps=float(eps),
    )


def _global_norm(gradients: Sequence[Tensor]) -> Tensor:
    norms: list[Tensor] = []
    for (batch,) in batches(gradients):
        if batch[0].device.type == "cpu":
            norms.extend(_norm_in_blocks(gradient) for gradient in batch)
        else:
            norms.extend(torch._foreach_norm(batch, 2, dtype=wide(batch[0])))  # noqa: SLF001
    return _norm(torch.stack([norm.to(norms[0]) for norm in norms]))


def _norm_in_blocks(gradient: Tensor) -> Tensor:
    """The norm of norms of short blocks.

    torch 2.13's norm of a whole float32 tensor on the CPU adds one square after the other: for
    15 million elements it is 6e-4 too small, and slower than this.
    """
    flat, dtype = gradient.reshape(-1), wide(gradient)
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = _norm(flat[:whole].view(-1, _BLOCK), dim=1, dtype=dtype)
    rest = _norm(flat[whole:], dtype=dtype)
    return _norm(torch.cat([blocks, rest.view(1)]))


def _unit_norms(tensor: Tensor) -> Tensor:
    """The norm of each element of the first axis, shaped to be multiplied with it."""
    axes = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    return _norm(tensor, dim=axes, keepdim=True, dtype=wide(tensor))


def _stored(slot: Slot) -> Tensor:
    """The weights beside the gradient's values: of a sparse one, the rows that it has."""
    rows = slot.rows
    if rows is None or slot.parameter.ndim == 1:
        return slot.parameter
    return slot.parameter[rows]


def _culprits(slots: Sequence[Slot]) -> str:
    found = [slot.label for slot in slots if not bool(slot.gradient.isfinite().all())]
    return "; ".join(found) or "only their sum of squares"
