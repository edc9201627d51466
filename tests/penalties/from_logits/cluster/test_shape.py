"""Division of a row among the blocks of a cluster."""

from __future__ import annotations

import pytest

from steelyard.penalties.from_logits.cluster.launch import ClusterShape, shape_for

HOPPER = (232448, 233472)  # bytes of shared memory in a block and in a multiprocessor


def shape_of(classes: int, itemsize: int = 2, inputs: int = 2) -> ClusterShape:
    aligned = classes * itemsize % 16 == 0
    shape = shape_for(classes, itemsize, inputs, aligned, *HOPPER)
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("classes", "inputs", "cluster"),
    [(8192, 2, 1), (32000, 2, 2), (70000, 2, 4), (128256, 1, 4), (128256, 2, 8), (151936, 2, 8)],
)
def test_the_smallest_cluster_with_three_slots(classes: int, inputs: int, cluster: int) -> None:
    shape = shape_of(classes, inputs=inputs)
    assert (shape.cluster, shape.slots) == (cluster, 3)


@pytest.mark.parametrize("classes", [1, 7, 8, 9, 1000, 50257, 128256, 262144])
@pytest.mark.parametrize(("itemsize", "inputs"), [(2, 1), (2, 2), (4, 1)])
def test_a_shape_holds_the_row_and_fits_the_gpu(classes: int, itemsize: int, inputs: int) -> None:
    """Wherever the row begins: a partial vector more than its bytes take."""
    shape = shape_of(classes, itemsize, inputs)
    before = 0 if classes * itemsize % 16 == 0 else 16 - itemsize
    assert shape.cluster * shape.capacity * 16 >= classes * itemsize + before
    assert shape.shared == shape.slots * inputs * shape.capacity * 16
    assert shape.min_blocks * (shape.shared + 1024) <= HOPPER[1]
    assert shape.min_blocks * shape.threads <= 1024


@pytest.mark.parametrize(("classes", "cluster"), [(50257, 2), (3 * 131072, 16)])
def test_rows_that_leave_room_for_two_slots(classes: int, cluster: int) -> None:
    shape = shape_of(classes)
    assert (shape.cluster, shape.slots) == (cluster, 2)


def test_rows_that_no_cluster_holds() -> None:
    assert shape_for(10**6, 4, 2, True, *HOPPER) is None


@pytest.mark.parametrize(
    ("classes", "warps"), [(32000, 16), (50257, 20), (128256, 16), (151936, 15), (262144, 16)]
)
def test_warps_divide_the_vectors_evenly(classes: int, warps: int) -> None:
    shape = shape_of(classes)
    assert shape.warps == warps
    # The rounds of a scheduler with the most warps, each a vector for every thread.
    rounds = -(-shape.capacity // (32 * warps)) * -(-warps // 4)
    assert rounds * 128 < 1.11 * shape.capacity


def test_short_rows_take_few_threads() -> None:
    assert shape_of(300).threads == 64
    assert shape_of(128256).threads == 544
