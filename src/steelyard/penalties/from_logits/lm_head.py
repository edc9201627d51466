"""The output layer of a language model: what it reads, and logits that it need not make.

It needs torch, which the rest of this package loads on demand only, so it is imported by its own
name: for the engine and the integrations, which both train language models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from steelyard.errors import InputError
from steelyard.penalties.from_logits.projection import Projection

__all__ = ["Heard", "affine", "overheard", "stand_in"]


@dataclass(eq=False)
class Heard:
    """The last call of an output layer, with a graph if there was one.

    Attributes:
        layer: the layer.
        hidden: what it read; None before the first call.
        made: what it gave.
        dtype: autocast's, if it computes in that.
    """

    layer: nn.Module
    hidden: Tensor | None = None
    made: Tensor | None = None
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

    def untouched(self, logits: Tensor) -> bool:
        """Whether the logits of a model are what the layer gave, but for their dtype."""
        made = self.made
        if made is None or made.shape != logits.shape:
            return False
        # The last position is as good as all of them, and costs little.
        return torch.equal(made[..., -1, :].to(logits.dtype), logits[..., -1, :])


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
        made: Tensor = own(hidden, *args, **kwargs) if instead is None else instead(hidden)
        # A later pass without a graph, of a reference for example, is not what terms read.
        if heard.hidden is None or torch.is_grad_enabled():
            kind = hidden.device.type
            cast = torch.is_autocast_enabled(kind)
            heard.hidden, heard.made = hidden, made
            heard.dtype = torch.get_autocast_dtype(kind) if cast else None
        return made

    # An attribute of the instance hides the method until it is deleted.
    layer.forward = forward
    try:
        yield heard
    finally:
        del layer.forward


def stand_in(hidden: Tensor) -> Tensor:
    """What an output layer gives where nobody reads its logits.

    One column, of a value that no scaling and no capping leaves as it is.
    """
    return torch.full_like(hidden[..., :1], 64.0)


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
