"""Division of a row among the blocks of a cluster."""

from __future__ import annotations

from typing import NamedTuple

_CLUSTERS = (1, 2, 4, 8, 16)  # more than 8 are not portable; H100 and H200 have 16
_SLOTS = (3, 2)  # rows that a block holds its part of, at a time
_MOST_BYTES = 75 * 1024  # of a slot: three of them fill a multiprocessor
_WARPS = 24  # on a multiprocessor: more would leave a thread too few registers
_RESERVED = 1024  # bytes of shared memory that CUDA takes for each block


class Shape(NamedTuple):
    """Division of a row, and the blocks that a multiprocessor runs.

    Attributes:
        cluster: Blocks in a cluster, which hold one row.
        warps: Warps in a block that compute; one more merges.
        slots: Rows of which a block holds its part at a time.
        capacity: Vectors of 16 bytes in a slot, for each input.
        min_blocks: Blocks on a multiprocessor that the registers have to allow.
        shared: Bytes of dynamic shared memory in a block.
    """

    cluster: int
    warps: int
    slots: int
    capacity: int
    min_blocks: int
    shared: int

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1)


def shape_for(vectors: int, inputs: int, per_block: int, per_multiprocessor: int) -> Shape | None:
    """Smallest cluster with three slots of a row, else with two; None if no cluster holds a row.

    Args:
        vectors: Vectors of 16 bytes in a row.
        inputs: 2 with a reference, else 1.
        per_block: Most bytes of shared memory in a block.
        per_multiprocessor: Bytes of shared memory in a multiprocessor.
    """
    for slots in _SLOTS:
        for cluster in _CLUSTERS:
            capacity = -(-vectors // cluster)
            warps = _warps(capacity)
            slot = 16 * inputs * capacity
            needed = slots * slot + _static(cluster, warps)
            last = slots == _SLOTS[-1] and cluster == _CLUSTERS[-1]
            if needed <= per_block and (slot <= _MOST_BYTES or last):
                blocks = per_multiprocessor // (needed + _RESERVED)
                min_blocks = max(1, min(blocks, _WARPS // warps))
                return Shape(cluster, warps, slots, capacity, min_blocks, slots * slot)
    return None


def _static(cluster: int, warps: int) -> int:
    """Most bytes of the kernel's `Shared`: parts of warps and blocks, rows and barriers."""
    return 2 * 32 * (8 * warps + cluster) + 512


def _warps(capacity: int) -> int:
    """Warps with the fewest idle lanes in their last turn, each with two or more turns."""
    most = max(1, min(_WARPS, capacity // 64))
    fewest = max(1, most * 2 // 3)
    return min(range(fewest, most + 1), key=lambda warps: (-capacity % (32 * warps), -warps))
