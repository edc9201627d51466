"""Find the sequences of a batch whose rows hold several of them, as packing makes them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """The tokens of one sequence: columns `start` to `end` of a row, the last one excluded."""

    row: int
    start: int
    end: int


def packed_spans(inputs: Mapping[str, Any], shape: torch.Size) -> list[Span] | None:
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
        Span(start // columns, start % columns, start % columns + end - start)
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
