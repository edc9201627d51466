"""Norms over several processes, against one process with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steelyard.composition import CompositeLoss
from tests.process_group import group_of_one, run_group

from . import sharded_ranks


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_training_equals_one_process(kind: str, ranks: int, tmp_path: Path) -> None:
    run_group(sharded_ranks.check_training, tmp_path, kind, ranks=ranks)


def test_optimizer_steps_with_an_aggregator(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_optimizer_steps, tmp_path)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_terms_that_did_not_run_everywhere(kind: str, tmp_path: Path) -> None:
    run_group(sharded_ranks.check_different_terms, tmp_path, kind)


def test_mixed_precision(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_mixed_precision, tmp_path)


def test_a_mesh_of_two_dimensions(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_two_dimensions, tmp_path, ranks=4)


def test_tensor_parallelism(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_tensor_parallel, tmp_path)


def test_refusals(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_refusals, tmp_path)


def test_the_first_fsdp_is_refused(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_first_fsdp, tmp_path)


def test_a_group_of_one(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        sharded_ranks.check_different_terms(0, "ddp")
        sharded_ranks.check_optimizer_steps(0)
        sharded_ranks.check_tensor_parallel(0)
        sharded_ranks.check_refusals(0)


def test_a_group_of_one_on_any_device(tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with group_of_one(tmp_path, "nccl" if device == "cuda" else "gloo"):
        sharded_ranks.check_training(0, "fsdp", device)
        sharded_ranks.check_training(0, "ddp", device)


def test_parameters_that_no_term_reaches(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(2, 2)})
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        loss = CompositeLoss(lambda x: x.square().mean(), track_grad_norms=True, wrt=wrapped)
        loss(x=model["used"](torch.ones(1, 4)))
        own = CompositeLoss(lambda x: x.square().mean(), track_grad_norms=True, wrt=model)
        own(x=model["used"](torch.ones(1, 4)))
    assert loss.output.base_loss.grad_norm == pytest.approx(own.output.base_loss.grad_norm)
