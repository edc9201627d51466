"""Packing sequences of many lengths into rows, so that little of the machine goes to padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Attention costs the square of a row, so rows are not made longer than they need be.
ROW = 512


@dataclass(frozen=True)
class PackedSequence:
    """Where a sequence lies: which one, in which row, from where to where."""

    index: int
    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Packing:
    """Some sequences in rows of one length."""

    rows: int
    length: int
    slots: tuple[PackedSequence, ...]

    def fill(self, tensors: Sequence[Tensor], value: float = 0) -> Tensor:
        """`[rows, length, ...]` with each sequence's tensor in its place, `value` elsewhere."""
        first = tensors[self.slots[0].index]
        shape = (self.rows, self.length, *first.shape[1:])
        packed = first.new_full(shape, value)
        for slot in self.slots:
            packed[slot.row, slot.start : slot.stop] = tensors[slot.index]
        return packed

    def positions(self) -> Tensor:
        """`[rows, length]`: positions that start again at 0 with each sequence.

        That is how transformers knows which tokens may see each other.
        """
        positions = torch.zeros(self.rows, self.length, dtype=torch.int64)
        ends = [0] * self.rows
        for slot in self.slots:
            positions[slot.row, slot.start : slot.stop] = torch.arange(slot.stop - slot.start)
            ends[slot.row] = max(ends[slot.row], slot.stop)
        for row, end in enumerate(ends):
            positions[row, end:] = torch.arange(self.length - end)
        return positions


def pack(lengths: Sequence[int], max_tokens: int, *, shared: bool = True) -> list[Packing]:
    """The sequences in packings of at most `max_tokens` tokens, padding counted.

    Longest first, each into the first row with room (first-fit decreasing). A sequence that
    is longer than `max_tokens` has a packing of its own. Where rows may not be `shared`, each
    sequence has a row of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    packings = [_packing([[i]], lengths[i], lengths) for i in order if lengths[i] > max_tokens]
    order = order[len(packings) :]
    if not order:
        return packings
    capacity = max(lengths[order[0]], min(ROW, max_tokens))
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        need = lengths[index]
        row = next((r for r, left in enumerate(room) if shared and left >= need), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= need
    used = [capacity - left for left in room]
    batch: list[int] = []
    for row in sorted(range(len(rows)), key=lambda r: -used[r]):
        if batch and used[batch[0]] * (len(batch) + 1) > max_tokens:
            packings.append(_packing([rows[r] for r in batch], used[batch[0]], lengths))
            batch = []
        batch.append(row)
    packings.append(_packing([rows[r] for r in batch], used[batch[0]], lengths))
    return packings


def _packing(rows: Sequence[Sequence[int]], length: int, lengths: Sequence[int]) -> Packing:
    slots = []
    for row, indices in enumerate(rows):
        start = 0
        for index in indices:
            slots.append(PackedSequence(index, row, start, start + lengths[index]))
            start += lengths[index]
    return Packing(len(rows), length, tuple(slots))
