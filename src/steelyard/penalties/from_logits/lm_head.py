"""Output layer of a language model: record its input, so that it need not compute logits.

This module needs torch, which the rest of the package imports on demand only, so it is imported by
its own name. The engine and the integrations use it; both train language models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steelyard.errors import InputError
from steelyard.penalties.from_logits.projection import Projection


@dataclass(eq=False)
class RecordedCall:
    """Record of an output layer's last call, of the last one with a graph if there was one.

    Attributes:
        layer: The layer.
        hidden: Its input; None before the first call.
        output: Its output.
        dtype: The dtype of autocast, if that was enabled.
    """

    layer: nn.Module
    hidden: Tensor | None = None
    output: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def projection(self) -> Projection | None:
        """Recorded input and the layer's weight as a `Projection`; None before the first call.

        Raises:
            InputError: The layer is neither `torch.nn.Linear` nor peft's LoRA of one.
        """
        if self.hidden is None:
            return None
        weight, bias = affine(self.layer)
        dtype = self.dtype or weight.dtype
        parts = (self.hidden, weight) if bias is None else (self.hidden, weight, bias)
        return Projection(*(part.to(dtype) for part in parts))

    def untouched(self, logits: Tensor) -> bool:
        """Return whether the model's logits are the layer's output, up to their dtype."""
        output = self.output
        if output is None or output.shape != logits.shape:
            return False
        # Comparing the last position is enough to see a scaling or a cap, and costs little.
        return torch.equal(output[..., -1, :].to(logits.dtype), logits[..., -1, :])


@contextmanager
def record_call(
    layer: nn.Module, instead: Callable[[Tensor], Tensor] | None = None
) -> Iterator[RecordedCall]:
    """Record the input and output of an output layer within the `with` block.

    Args:
        layer: The layer.
        instead: Replaces the layer's forward pass; None computes its logits.
    """
    call, own = RecordedCall(layer), layer.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = own(hidden, *args, **kwargs) if instead is None else instead(hidden)
        # Ignore a later pass without a graph, for example of a reference model.
        if call.hidden is None or torch.is_grad_enabled():
            kind = hidden.device.type
            cast = torch.is_autocast_enabled(kind)
            call.hidden, call.output = hidden, output
            call.dtype = torch.get_autocast_dtype(kind) if cast else None
        return output

    with forward_replaced(layer, forward):
        yield call


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward method of one module within the `with` block.

    A module whose `forward` was replaced before (by accelerate, or by TRL's
    `cast_lm_head_to_fp32`) gets that one back.
    """
    before = vars(module).get("forward")
    # An attribute of the instance shadows the method of its class.
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def stand_in(hidden: Tensor) -> Tensor:
    """Placeholder for the output of a layer whose logits are not read.

    It is one column of the value 64, which any scaling or soft cap of the logits would change, so
    that `RecordedCall.untouched` detects it.
    """
    return torch.full_like(hidden[..., :1], 64.0)


def affine(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Effective weight and bias of an output layer, differentiable.

    With LoRA the weight is `W + scale · B A` in the wider of their dtypes, since a 16-bit float
    would round a small B A away. LoRA's dropout is not applied.

    Raises:
        InputError: The layer is neither `torch.nn.Linear` nor peft's LoRA of one.
    """
    linear, names = _linear_and_adapters(layer)
    weight: Tensor = linear.weight
    for name in names:
        weight = weight + layer.get_delta_weight(name)
    return weight, linear.bias


class LowRank(NamedTuple):
    """Summand `scale · B A` of a weight, with `A: [rank, features]` and `B: [classes, rank]`."""

    a: Tensor
    b: Tensor
    scale: float


def factors(layer: Any) -> tuple[Tensor, Tensor | None, list[LowRank]]:
    """Weight and bias of an output layer without LoRA, and what LoRA adds to the weight.

    Raises:
        InputError: The layer is neither `torch.nn.Linear` nor peft's LoRA of one.
    """
    linear, names = _linear_and_adapters(layer)
    added = [
        LowRank(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
        for name in names
    ]
    return linear.weight, linear.bias, added


def _linear_and_adapters(layer: Any) -> tuple[nn.Linear, list[str]]:
    """Base layer of an output layer, and the names of the adapters that it applies."""
    linear = getattr(layer, "base_layer", layer)
    names = [name for name in getattr(layer, "lora_A", ()) if name in layer.active_adapters]
    varied = [name for name in names if name in layer.lora_variant]
    if not isinstance(linear, nn.Linear) or (linear is not layer and not hasattr(layer, "lora_A")):
        kind = type(layer).__qualname__
        raise InputError(
            f"a projection needs an output layer that is torch.nn.Linear, or peft's LoRA of one, "
            f"got {kind}: read logits."
        )
    if varied:
        raise InputError(
            f"a projection needs plain LoRA in the output layer, got a variant of it "
            f"({varied[0]!r}): read logits."
        )
    applied = names if names and not layer.merged and not layer.disable_adapters else []
    return linear, applied
