"""Division of a row among the blocks of a cluster."""

from __future__ import annotations

from typing import NamedTuple

VECTOR_BYTES = 16  # of the widest load
# Blocks in a cluster, and rows that a block holds its part of at a time; the first that fit. More
# than 8 blocks are not portable; H100 and H200 have 16. Other sizes fill a GPU less well: clusters
# of 3 cover 117 of an H200's 132 multiprocessors, those of 2 all, so two slots are better there.
_CANDIDATES = ((1, 3), (2, 3), (2, 2), (4, 3), (8, 3), (16, 3), (16, 2))
# Warps in a block. More merge more, fewer hide less of each other's waiting; among these, those
# that divide the vectors most evenly.
_WARPS = (12, 13, 14, 15, 16, 20)
_RESIDENT = 16  # warps on a multiprocessor, if blocks are small
_SCHEDULERS = 4  # of a multiprocessor; each runs a quarter of the warps
_RESERVED = 1024  # bytes of shared memory that CUDA takes for each block


class ClusterShape(NamedTuple):
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
        """Threads of a block, those that merge included."""
        return 32 * (self.warps + 1)


def shape_for(
    classes: int,
    itemsize: int,
    inputs: int,
    aligned: bool,
    per_block: int,
    per_multiprocessor: int,
) -> ClusterShape | None:
    """The first candidate whose shared memory holds rows; None if no cluster does.

    Args:
        classes: Length of a row.
        itemsize: Bytes of an element.
        inputs: 2 with a reference, else 1.
        aligned: Whether rows begin and end at multiples of 16 bytes.
        per_block: Most bytes of shared memory in a block.
        per_multiprocessor: Bytes of shared memory in a multiprocessor.
    """
    vector = VECTOR_BYTES // itemsize
    vectors = -(-(classes + (0 if aligned else vector - 1)) // vector)
    for cluster, slots in _CANDIDATES:
        capacity = -(-vectors // cluster)
        warps = _warps(capacity)
        dynamic = slots * inputs * capacity * VECTOR_BYTES
        needed = dynamic + _static(cluster, warps)
        if needed <= per_block:
            blocks = per_multiprocessor // (needed + _RESERVED)
            min_blocks = max(1, min(blocks, _RESIDENT // (warps + 1)))
            return ClusterShape(cluster, warps, slots, capacity, min_blocks, dynamic)
    return None


def _warps(capacity: int) -> int:
    """Warps for a block's vectors; for short rows so few that a thread has a few vectors.

    All wait for the scheduler that has the most to do: its warps times the vectors of a thread.
    """
    most = min(_WARPS[-1], capacity // 64)
    if most < _WARPS[0]:
        return max(1, most)
    return min(
        (warps for warps in _WARPS if warps <= most),
        key=lambda warps: -(-capacity // (32 * warps)) * -(-warps // _SCHEDULERS),
    )


def _static(cluster: int, warps: int) -> int:
    """Most bytes of the kernel's `Shared`: parts of warps and blocks, rows and barriers."""
    return 2 * 32 * (warps + cluster) + 1024
