"""Hugging Face models whose logits nobody reads: their own loss, and terms, from a projection."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from steelyard.integrations.huggingface.causal_lm import IGNORED, next_labels
from steelyard.penalties.from_logits import Projection, cross_entropy
from steelyard.penalties.from_logits.lm_head import Heard, overheard, stand_in


class Counted(NamedTuple):
    """What terms read of a projection.

    Attributes:
        projection: the rows whose label counts, `[N, V]`; without labels, all of them.
        targets: the labels of these rows, `[N]`; None without labels.
        mask: where these rows are in the batch, `[B, T]`; None without labels.
    """

    projection: Projection
    targets: Tensor | None
    mask: Tensor | None


def counted(projection: Projection, inputs: Mapping[str, Any], *, shifted: bool = True) -> Counted:
    """The rows of a projection whose label counts.

    Args:
        projection: of a whole batch.
        inputs: with `labels`, or `shift_labels`.
        shifted: whether the loss compares with the label of the next position.
    """
    labels = next_labels(inputs, shifted=shifted)
    if labels is None or tuple(labels.shape) != projection.shape[:-1]:
        return Counted(projection, None, None)
    mask = labels.to(projection.hidden.device) != IGNORED
    return Counted(projection[mask], labels.to(mask.device)[mask], mask)


@dataclass(eq=False)
class OwnLoss:
    """A model's own loss, as transformers computes it, from what the output layer read.

    Attributes:
        heard: what the output layer read.
        often: whether its graph is gone through several times, for norms. The gradient is made
            in the backward pass then, which costs one projection more.
        counted: what the loss was computed from; None if it was not.
    """

    heard: Heard
    often: bool = False
    counted: Counted | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """What `ForCausalLMLoss` gives; nothing of use if the logits are no longer the layer's."""
        projection = self.heard.projection
        same = self.heard.untouched(logits) and ignore_index == IGNORED
        if projection is None or not same or projection.shape[-1] != vocab_size:
            return logits.sum()
        found = counted(projection, {"labels": labels, "shift_labels": shift_labels})
        rows, targets, _mask = found
        if targets is None:
            return logits.sum()
        self.counted = found
        total: Tensor = cross_entropy(
            rows, targets, reduction="none" if self.often else "sum"
        ).sum()
        return total / (rows.shape[0] if num_items_in_batch is None else num_items_in_batch)


@contextmanager
def standing_in(model: Any, layer: nn.Module, *, often: bool = False) -> Iterator[OwnLoss]:
    """Let a model compute its own loss without logits, for as long as the block lasts.

    Args:
        model: one of transformers'.
        layer: its output layer.
        often: whether the loss is differentiated several times.
    """
    own, mine = model.loss_function, "_loss_function" in vars(model)
    with overheard(layer, stand_in) as heard:
        loss = OwnLoss(heard, often)
        model.loss_function = loss
        try:
            yield loss
        finally:
            model.loss_function = own
            if not mine:
                del model._loss_function  # noqa: SLF001 - where its setter has put it


def can_stand_in(model: Any, layer: object) -> bool:
    """Whether the loss is transformers' own, and the output layer one that nobody watches."""
    return (
        getattr(model, "loss_function", None) is ForCausalLMLoss
        and type(layer) is nn.Linear
        and not layer._forward_hooks  # noqa: SLF001 - nothing public says it
    )
