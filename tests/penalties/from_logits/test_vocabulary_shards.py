"""Logits whose classes are spread over processes, against whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from steelyard.errors import InputError
from steelyard.penalties.from_logits import entropy
from tests.process_group import group_of_one, run_group

from . import sharded_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients(ranks: int, tmp_path: Path) -> None:
    run_group(sharded_ranks.check_terms, tmp_path, ranks=ranks)


def test_composed_terms(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_composed, tmp_path)


def test_a_composite(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_composite, tmp_path)


def test_a_projection(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_projection, tmp_path)


def test_a_group_of_one(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        sharded_ranks.check_terms(0)
        sharded_ranks.check_composed(0)
        sharded_ranks.check_projection(0)
        sharded_ranks.check_composite(0)


def test_a_process_without_classes() -> None:
    # Nothing is sent: the inputs are refused before.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        own, shape = torch.zeros(2, 1), torch.zeros(2, 3).shape
        logits = DTensor.from_local(own, mesh, [Shard(1)], shape=shape, stride=(3, 1))
        with pytest.raises(
            InputError, match="at least one, got 3 classes on 4 processes: pass log"
        ):
            entropy(logits)
    finally:
        dist.destroy_process_group()
