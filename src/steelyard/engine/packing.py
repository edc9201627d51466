"""Packing of sequences of different lengths into rows, which wastes little on padding.

Instead of one padded row for each sequence, several sequences lie one after another in a row. They
do not attend to each other: position ids start again at 0 with each of them, and transformers makes
a block-diagonal causal mask of that. A `Packing` is one batch `[rows, length]` for the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Attention costs the square of the length of a row, so short sequences fill rows up to here only.
ROW = 512


@dataclass(frozen=True)
class PackedSequence:
    """Place of a sequence in a packing: `packed[row, start:stop]` is sequence `index`."""

    index: int
    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Packing:
    """Places of some sequences in `rows` rows of one `length`.

    Attributes:
        in_one_row: whether there is a single row, which the sequences fill one after another in the
            order given here, and whose attention gets their lengths in place of a mask.
    """

    rows: int
    length: int
    sequences: tuple[PackedSequence, ...]
    in_one_row: bool = False

    @property
    def size(self) -> int:
        """Number of tokens, padding included."""
        return self.rows * self.length

    def fill(self, tensors: Sequence[Tensor] | Mapping[int, Tensor], value: float = 0) -> Tensor:
        """Pack tensors `[T, ...]`, one for each sequence, into `[rows, length, ...]`.

        Args:
            tensors: by the index of the sequence; of others than those packed here, too or not.
            value: put where there is no sequence.
        """
        if self.in_one_row:
            return torch.cat([tensors[place.index] for place in self.sequences])[None]
        first = tensors[self.sequences[0].index]
        shape = (self.rows, self.length, *first.shape[1:])
        packed = first.new_full(shape, value)
        for place in self.sequences:
            packed[place.row, place.start : place.stop] = tensors[place.index]
        return packed

    def positions(self) -> Tensor:
        """Position ids `[rows, length]`, which start again at 0 with each sequence.

        From the places where they fall, transformers finds which tokens may attend to each other.
        """
        if self.in_one_row:
            return torch.cat([torch.arange(s.stop - s.start) for s in self.sequences])[None]
        positions = torch.zeros(self.rows, self.length, dtype=torch.int64)
        ends = [0] * self.rows
        for place in self.sequences:
            positions[place.row, place.start : place.stop] = torch.arange(place.stop - place.start)
            ends[place.row] = max(ends[place.row], place.stop)
        # The padding at the end of a row counts as one more sequence: left at position 0 each of
        # its tokens would be a sequence of its own.
        for row, end in enumerate(ends):
            positions[row, end:] = torch.arange(self.length - end)
        return positions


def pack(lengths: Sequence[int], max_tokens: int, *, shared: bool = True) -> list[Packing]:
    """Distribute sequences over packings of at most `max_tokens` tokens, padding included.

    First-fit decreasing: the longest sequence first, each into the first row where it fits. Rows
    are then sorted by their length and cut into packings, so that the rows of a packing have
    similar lengths.

    Args:
        lengths: of the sequences.
        max_tokens: most tokens of a packing. A longer sequence has a packing of its own.
        shared: whether several sequences may share a row.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    packings = [_packing([[i]], lengths[i], lengths) for i in order if lengths[i] > max_tokens]
    order = order[len(packings) :]
    if not order:
        return packings
    capacity = max(lengths[order[0]], min(ROW, max_tokens))
    rows: list[list[int]] = []
    free: list[int] = []
    for index in order:
        length = lengths[index]
        row = next((r for r, left in enumerate(free) if shared and left >= length), None)
        if row is None:
            rows.append([])
            free.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        free[row] -= length
    used = [capacity - left for left in free]
    # Longest row first: the first row of a batch sets the length of its packing.
    batch: list[int] = []
    for row in sorted(range(len(rows)), key=lambda r: -used[r]):
        if batch and used[batch[0]] * (len(batch) + 1) > max_tokens:
            packings.append(_packing([rows[r] for r in batch], used[batch[0]], lengths))
            batch = []
        batch.append(row)
    packings.append(_packing([rows[r] for r in batch], used[batch[0]], lengths))
    return packings


def pack_in_one_row(lengths: Sequence[int], max_tokens: int) -> list[Packing]:
    """Distribute sequences over packings of one row without padding, of at most `max_tokens`.

    First-fit decreasing; within a packing the sequences have the order in which they were given.

    Args:
        lengths: of the sequences.
        max_tokens: most tokens of a packing. A longer sequence has a packing of its own.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        row = next((r for r, left in enumerate(free) if left >= length), None)
        if row is None:
            rows.append([])
            free.append(max(max_tokens, length))
            row = len(rows) - 1
        rows[row].append(index)
        free[row] -= length
    return [
        replace(_packing([sorted(row)], sum(lengths[i] for i in row), lengths), in_one_row=True)
        for row in rows
    ]


def _packing(rows: Sequence[Sequence[int]], length: int, lengths: Sequence[int]) -> Packing:
    places = []
    for row, indices in enumerate(rows):
        start = 0
        for index in indices:
            places.append(PackedSequence(index, row, start, start + lengths[index]))
            start += lengths[index]
    return Packing(len(rows), length, tuple(places))
