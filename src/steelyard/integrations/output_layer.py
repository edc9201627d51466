"""The output layer of a language model: what it reads, and logits that it need not make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.errors import InputError
from steelyard.penalties.from_logits import Projection


@dataclass(eq=False)
class Heard:
    """The last call of an output layer.

    Attributes:
        layer: the layer.
        hidden: what it read; None before the first call.
        dtype: autocast's, if it computes in that.
    """

    layer: nn.Module
    hidden: Tensor | None = None
    dtype: torch.dtype | None = None

    @property
    def projection(self) -> Projection | None:
        """The logits that it makes of what it read, as it makes them; None before the first call.

        Raises:
            InputError: it is neither `torch.nn.Linear` nor peft's LoRA of one.
        """
        if self.hidden is None:
            return None
        weight, bias = affine(self.layer)
        dtype = self.dtype or weight.dtype
        parts = (self.hidden, weight) if bias is None else (self.hidden, weight, bias)
        return Projection(*(part.to(dtype) for part in parts))


@contextmanager
def overheard(
    layer: nn.Module, instead: Callable[[Tensor], Tensor] | None = None
) -> Iterator[Heard]:
    """Note what an output layer reads, for as long as the block lasts.

    Args:
        layer: the layer.
        instead: what the layer gives for what it reads, in the place of logits; None: its logits.
    """
    heard, own = Heard(layer), layer.forward

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kind = hidden.device.type
        heard.hidden = hidden
        heard.dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        made: Tensor = own(hidden, *args, **kwargs) if instead is None else instead(hidden)
        return made

    # An attribute of the instance hides the method until it is deleted.
    layer.forward = forward
    try:
        yield heard
    finally:
        del layer.forward


def affine(layer: Any) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias that an output layer amounts to, differentiable.

    With LoRA the weight is `W + scale · B A`, in the wider of their dtypes, since a narrow one
    would round a small B A away; its dropout is left out.

    Raises:
        InputError: it is neither `torch.nn.Linear` nor peft's LoRA of one.
    """
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
    weight: Tensor = linear.weight
    if names and not layer.merged and not layer.disable_adapters:
        for name in names:
            weight = weight + layer.get_delta_weight(name)
    return weight, linear.bias
