"""Norms over several processes, against one process with the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process_group import run_group

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
