"""Tensors that are spread over processes: one process here, several where composites are tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from steelyard.gradients.algebra import gram
from steelyard.gradients.sharded import (
    is_sharded,
    local_part,
    part_like,
    sharded_dimensions,
    sharded_gram,
    sharded_like,
    whole,
)
from tests.process_group import group_of_one, run_group


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    with group_of_one(tmp_path):
        yield init_device_mesh("cpu", (1,))


def test_a_plain_tensor_is_whole() -> None:
    x = torch.ones(3)
    assert not is_sharded(x)
    assert whole(x) is x
    assert local_part(x) is x
    assert part_like(x, x) is x


def test_parts_of_a_sharded_tensor(mesh: DeviceMesh) -> None:
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert is_sharded(x)
    assert torch.equal(whole(x.sum()), torch.tensor(6.0))
    local_part(x)[0] = 5.0  # the same memory
    assert whole(x)[0] == 5.0
    assert torch.equal(part_like(torch.ones(4), x), torch.ones(4))
    assert sharded_dimensions(x) == (0,)
    assert sharded_like(x, x) is x


def test_parts_that_are_to_be_added_count_as_their_sum(mesh: DeviceMesh) -> None:
    like = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    gradient = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    assert sharded_like(gradient, like).placements == (Replicate(),)
    assert sharded_dimensions(like) == ()


def test_gram_of_plain_and_sharded_entries(mesh: DeviceMesh) -> None:
    plain = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    rows = [[plain[0], plain[1], None], [plain[1], None, None]]
    like = [plain[0], *(distribute_tensor(x, mesh, [Shard(0)]) for x in (plain[1], plain[0]))]
    sharded = [
        [x if x is None or i == 0 else distribute_tensor(x, mesh, [Shard(0)]) for i, x in row]
        for row in map(enumerate, rows)
    ]
    found = torch.tensor(sharded_gram(sharded, like))
    torch.testing.assert_close(found, torch.tensor(gram(rows)))


def sum_of_parts(rank: int) -> tuple[list[list[float]], float]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    copied = distribute_tensor(torch.ones(3), mesh, [Replicate()])
    return sharded_gram([[sharded, copied]], [sharded, copied]), whole(sharded.sum()).item()


def test_replicated_entries_count_once(tmp_path: Path) -> None:
    expected = ([[0.0 + 1 + 4 + 9 + 16 + 3]], 10.0)
    assert run_group(sum_of_parts, tmp_path) == [expected, expected]
