"""The loss of a Hugging Face causal LM from the hidden states, without materialized logits.

The logits `[B, T, V]` of a large vocabulary are most of a step's memory. If no term reads them,
the output layer is replaced during the forward pass by one that returns a placeholder, and the
model's `loss_function` by one that computes the same cross-entropy from the layer's input, in
chunks (`penalties.from_logits.Projection`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from steelyard.integrations.huggingface.causal_lm import IGNORE_INDEX, next_labels
from steelyard.penalties.from_logits import Projection, cross_entropy
from steelyard.penalties.from_logits.lm_head import Heard, overheard, stand_in


class LabelledRows(NamedTuple):
    """The positions of a batch that its loss counts: those whose label is not -100.

    Attributes:
        projection: the rows of these positions, `[N, V]`.
        targets: their labels, `[N]`.
    """

    projection: Projection
    targets: Tensor


def labelled_rows(projection: Projection, inputs: Mapping[str, Any]) -> LabelledRows | None:
    """Select the rows of a projection whose label is not -100; None if the labels do not fit.

    Args:
        projection: of a whole batch, `[B, T, V]`.
        inputs: with `labels`, or `shift_labels`, `[B, T]`.
    """
    labels = next_labels(inputs, shifted=True)
    if labels is None or tuple(labels.shape) != projection.shape[:-1]:
        return None
    labels = labels.to(projection.hidden.device)
    kept = labels != IGNORE_INDEX
    return LabelledRows(projection[kept], labels[kept])


@dataclass(eq=False)
class LogitFreeLoss:
    """transformers' `ForCausalLMLoss`, computed from the input of the output layer.

    Attributes:
        head: the last call of the output layer.
        retain_graph: whether the loss is differentiated several times, for gradient norms. The
            gradient is then computed in the backward pass, which costs one projection more; else
            it is computed with the loss.
        rows: the rows that the loss was computed from; None if it was not computed.
    """

    head: Heard
    retain_graph: bool = False
    rows: LabelledRows | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Compute the loss with the signature of `ForCausalLMLoss`.

        If the model has changed the logits after the output layer, or asks for another loss, the
        value is meaningless and `rows` stays None: the caller runs the model again with logits.

        Args:
            logits: the placeholder that the output layer returned.
            labels: `[B, T]`.
            vocab_size: V.
            num_items_in_batch: the divisor of the sum; None: the number of labelled rows.
            ignore_index: must be -100.
            shift_labels: labels that are already aligned with the positions, `[B, T]`.
        """
        projection = self.head.projection
        same = self.head.untouched(logits) and ignore_index == IGNORE_INDEX
        if projection is None or not same or projection.shape[-1] != vocab_size:
            return logits.sum()
        found = labelled_rows(projection, {"labels": labels, "shift_labels": shift_labels})
        if found is None:
            return logits.sum()
        self.rows = found
        rows, targets = found
        # reduction="sum" computes the gradient together with the value, once.
        total: Tensor = cross_entropy(
            rows, targets, reduction="none" if self.retain_graph else "sum"
        ).sum()
        return total / (rows.shape[0] if num_items_in_batch is None else num_items_in_batch)


@contextmanager
def without_logits(
    model: Any, layer: nn.Module, *, retain_graph: bool = False
) -> Iterator[LogitFreeLoss]:
    """Let a model compute its own loss without logits until the block ends.

    Args:
        model: one of transformers', which `supports_logit_free_loss`.
        layer: its output layer.
        retain_graph: whether the loss is differentiated several times.
    """
    original, was_set = model.loss_function, "_loss_function" in vars(model)
    with overheard(layer, stand_in) as head:
        loss = LogitFreeLoss(head, retain_graph)
        model.loss_function = loss
        try:
            yield loss
        finally:
            model.loss_function = original
            # `loss_function` is a property whose setter creates this attribute.
            if not was_set:
                del model._loss_function  # noqa: SLF001


def supports_logit_free_loss(model: Any, layer: object) -> bool:
    """True if the loss is transformers' own, and the output layer a plain one without hooks."""
    return (
        getattr(model, "loss_function", None) is ForCausalLMLoss
        and type(layer) is nn.Linear
        and not layer._forward_hooks  # noqa: SLF001 - torch has no public name for it
    )
