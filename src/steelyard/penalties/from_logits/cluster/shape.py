"""Division of a row among the blocks of a cluster."""

from __future__ import annotations

from typing import NamedTuple

_CLUSTERS = (1, 2, 4, 8, 16)  # more than 8 are not portable; H100 and H200 have 16
_BLOCKS = (3, 2, 1)  # on a multiprocessor at a time
_THREADS = 256
_STAGES = 4  # of copies, as in `primitives.cuh`
_RESERVED = 1024  # bytes of shared memory that CUDA takes for each block


class Shape(NamedTuple):
    """Division of a row, and the blocks that a multiprocessor runs.

    Attributes:
        cluster: Blocks in a cluster, which hold one row.
        threads: Threads in a block.
        capacity: Vectors of 16 bytes in a block, for each input.
        stage: Vectors that are copied, and waited for, together.
        min_blocks: Blocks on a multiprocessor that the registers have to allow.
        shared: Bytes of dynamic shared memory in a block.
    """

    cluster: int
    threads: int
    capacity: int
    stage: int
    min_blocks: int
    shared: int


def shape_for(vectors: int, inputs: int, per_block: int, per_multiprocessor: int) -> Shape | None:
    """Smallest cluster with which three blocks run on a multiprocessor, else two, else one.

    Three blocks hide each other's waiting; small clusters wait less. None if no cluster holds a
    row.

    Args:
        vectors: Vectors of 16 bytes in a row.
        inputs: 2 with a reference, else 1.
        per_block: Most bytes of shared memory in a block.
        per_multiprocessor: Bytes of shared memory in a multiprocessor.
    """
    for blocks in _BLOCKS:
        most = min(per_block, per_multiprocessor // blocks - _RESERVED)
        for cluster in _CLUSTERS:
            capacity = -(-vectors // cluster)
            shared = 16 * inputs * capacity
            if shared + _static(cluster) <= most:
                threads = _threads(capacity)
                stage = threads * -(-capacity // (threads * _STAGES))
                return Shape(cluster, threads, capacity, stage, 3 * _THREADS // threads, shared)
    return None


def _static(cluster: int) -> int:
    """Most bytes of the kernel's `Shared`: parts of warps and blocks, and the row."""
    return 2 * 4 * 8 * max(cluster, _THREADS // 32) + 128


def _threads(capacity: int) -> int:
    """Threads in a block: fewer for short rows, so that each has a few vectors."""
    threads = 32
    while threads < _THREADS and 4 * threads < capacity:
        threads *= 2
    return threads
