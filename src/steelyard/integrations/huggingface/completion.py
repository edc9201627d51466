"""Completion of a batch: the tokens that a trainer's loss counts, and their log-probs and logits.

Which tokens these are for each trainer is in `trainer_kinds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.errors import InputError
from steelyard.integrations.huggingface.causal_lm import (
    IGNORE_INDEX,
    Forward,
    logits_at,
    next_labels,
    output_layer,
    projection_of,
)
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits.lm_head import RecordedCall
from steelyard.penalties.from_logits.projection import Projection


class SequenceSpan(NamedTuple):
    """The tokens of one sequence: columns `start` to `end` of a row, the last one excluded."""

    row: int
    start: int
    end: int


def packed_spans(inputs: Mapping[str, Any], shape: torch.Size) -> list[SequenceSpan] | None:
    """Find the sequences of a batch in the arguments of its model, as the model tells them apart.

    Cumulative lengths say where sequences begin. Without them a sequence begins where the positions
    of two attended tokens do not follow each other, which is the rule of transformers' attention.
    Sequences of one token have no prediction and are left out: they are padding to a multiple.

    Args:
        inputs: with `cu_seq_lens_q`, or `position_ids` and perhaps `attention_mask`.
        shape: of the batch, `[B, T]`.

    Returns:
        The sequences in order; None if each row is one.
    """
    rows, columns = shape
    lengths, positions = inputs.get("cu_seq_lens_q"), inputs.get("position_ids")
    if isinstance(lengths, Tensor) and lengths.dim() == 1 and lengths[-1] == rows * columns:
        starts = lengths[:-1].tolist()
    elif isinstance(positions, Tensor) and positions.shape in (shape, (1, columns)):
        starts = _restarts(positions.expand(shape), inputs.get("attention_mask"))
    else:
        return None
    every_row = range(0, rows * columns + 1, columns)
    bounds = sorted({*starts, *every_row})
    if bounds == list(every_row):
        return None
    return [
        SequenceSpan(start // columns, start % columns, start % columns + end - start)
        for start, end in pairwise(bounds)
        if end - start > 1
    ]


def _restarts(positions: Tensor, mask: Any) -> list[int]:
    """Indices, in the flattened batch, of tokens that do not follow the one before them."""
    jumps = positions.diff() != 1
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        attended = mask != 0
        jumps &= attended[:, 1:] & attended[:, :-1]
    return torch.nn.functional.pad(jumps, (1, 0)).flatten().nonzero()[:, 0].tolist()


class Completion:
    """The tokens of a batch that the loss counts, as one forward pass of a model sees them.

    B sequences of T positions; N tokens count. A number for each token has the shape `[B, W]`, and
    is 0 where `mask` is False; W is T - 1, or the width of the completion where the trainer keeps
    prompts and completions apart. A row of the vocabulary for each token has the shape `[N, V]`, in
    the order of the mask.

    Args:
        unwrapped: the model without wrappers.
        forward: its forward pass.
        labels: `[B, T]`, -100 wherever no token counts.
        shifted: whether a position is compared with the label of the next one.
        width: W, counted from the last column; None is all columns.
        temperature: divides the logits.
        head: the call of the output layer, if it was recorded.
        rows: projection of the N tokens, if it is known already.
        spans: the sequences, if a row holds several.

    Attributes:
        positions: `[B, T]`: the positions whose prediction counts.
        mask: `[B, W]`: the tokens that count.
        labels: `[B, W]`, -100 where `mask` is False.
        targets: `[N]`, the tokens that count.
    """

    def __init__(
        self,
        unwrapped: Any,
        forward: Forward,
        labels: Tensor,
        *,
        shifted: bool,
        width: int | None = None,
        temperature: float = 1.0,
        head: RecordedCall | None = None,
        rows: Projection | None = None,
        spans: Sequence[SequenceSpan] | None = None,
    ) -> None:
        self._unwrapped, self._forward, self._head, self._rows = unwrapped, forward, head, rows
        self._temperature, self._spans = temperature, spans
        # A position that is compared with the next token: the last one of a sequence has none.
        self._unpredicted = int(shifted)
        aligned = next_labels({"labels": labels}, shifted=shifted)
        assert aligned is not None  # noqa: S101 - for mypy: it has labels
        self.positions = aligned != IGNORE_INDEX
        self.targets = aligned[self.positions]
        columns = slice(None, -1 if shifted else None)
        self.labels = aligned[:, columns] if width is None else aligned[:, columns][:, -width:]
        self.mask = self.labels != IGNORE_INDEX

    def seen_by(self, unwrapped: Any, forward: Forward) -> Completion:
        """The same tokens, as a forward pass of another model sees them."""
        other = copy(self)
        other._unwrapped, other._forward = unwrapped, forward  # noqa: SLF001 - of this class
        other._head = other._rows = None  # noqa: SLF001
        return other

    def logprobs(self) -> Tensor:
        """Log-prob of each token, `[B, W]`."""
        fused = self._fused("log_probs")
        if fused is not None:
            return fused
        rows = self._vocabulary()
        return self._placed(from_logits.target_logprobs(rows, self.targets.to(_device(rows))))

    def entropy(self) -> Tensor:
        """Entropy of the distribution that each token was drawn from, `[B, W]`."""
        fused = self._fused("entropy")
        if fused is not None:
            return fused
        return self._placed(from_logits.entropy(self._vocabulary(), reduction="none"))

    def logits(self) -> Tensor:
        """Logits of each token, `[N, V]`; behind a fused head they are computed for these only."""
        if self._rows is not None:
            logits: Tensor = self._rows.logits()
            return logits
        logits = logits_at(self._unwrapped, self._forward, self.positions)
        return logits if self._temperature == 1 else logits / self._temperature

    def projection(self) -> Projection:
        """Projection that stands for `logits()`.

        Raises:
            InputError: the model has no output layer, changes its logits after it, or the layer is
                of an unknown kind.
        """
        if self._rows is not None:
            return self._rows
        layer = output_layer(self._unwrapped)
        whole = None
        if layer is not None:
            whole = projection_of(self._unwrapped, self._forward, self._head or RecordedCall(layer))
        if whole is None:
            raise InputError(
                f"projection needs a language model with an output layer, and "
                f"{type(self._unwrapped).__name__} has none: read hidden_states."
            )
        # A prompt-learning adapter puts virtual tokens in front.
        rows = whole[:, -self.positions.shape[1] :][self.positions.to(whole.hidden.device)]
        if self._temperature == 1:
            return rows
        bias = None if rows.bias is None else rows.bias / self._temperature
        return replace(rows, hidden=rows.hidden / self._temperature, bias=bias)

    def data(self, **numbers: Tensor | None) -> list[dict[str, Any]]:
        """One datum for each sequence, as terms over `(data, logprobs)` read it.

        Args:
            numbers: of each token, `[B, W]`, to put in by these names, such as
                `reference_logprobs`; None leaves one out.
        """
        given = {name: values for name, values in numbers.items() if values is not None}
        columns = {"target_tokens": self.labels, "weights": self.mask.float(), **given}
        split = [self.by_sequence(values) for values in columns.values()]
        return [
            {"loss_fn_inputs": dict(zip(columns, values, strict=True))}
            for values in zip(*split, strict=True)
        ]

    def by_sequence(self, values: Tensor) -> list[Tensor]:
        """Split values `[B, W]` into those of each sequence, `[W]`, or shorter ones if packed."""
        if self._spans is None:
            return list(values)
        return [values[span.row, span.start : span.end - self._unpredicted] for span in self._spans]

    def keep(self, values: Tensor) -> Tensor:
        """Cut values of each token to the width of the completion, with 0 where none counts."""
        return values[:, -self.mask.shape[1] :].where(self.mask.to(values.device), 0.0)

    def _fused(self, field: str) -> Tensor | None:
        values = getattr(self._forward.outputs, field, None)
        return self.keep(values) if isinstance(values, Tensor) else None

    def _vocabulary(self) -> Tensor | Projection:
        """Rows of the vocabulary: logits if the pass has them, else a projection if possible."""
        if self._rows is None and getattr(self._forward.outputs, "logits", None) is not None:
            return self.logits()
        try:
            return self.projection()
        except InputError:  # the model changes its logits after the output layer
            return self.logits()

    def _placed(self, values: Tensor) -> Tensor:
        """Put values `[N]` into their places, `[B, W]`."""
        mask = self.mask.to(values.device)
        return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _device(rows: Tensor | Projection) -> Any:
    return rows.hidden.device if isinstance(rows, Projection) else rows.device
