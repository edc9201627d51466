"""Transforms of parameters that are spread over processes, against one process."""

from __future__ import annotations

from pathlib import Path

from tests.process_group import group_of_one, run_group

from . import sharded_ranks


def test_two_processes(tmp_path: Path) -> None:
    kinds, widths = ["ddp", "fsdp", "tensor"], ["even"]
    run_group(sharded_ranks.check_transforms, tmp_path, kinds, widths)


def test_four_processes_and_uneven_shards(tmp_path: Path) -> None:
    kinds, widths = ["fsdp", "hybrid"], ["uneven"]
    run_group(sharded_ranks.check_transforms, tmp_path, kinds, widths, ranks=4)


def test_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    run_group(sharded_ranks.check_not_finite, tmp_path)


def test_a_group_of_one(tmp_path: Path) -> None:
    with group_of_one(tmp_path):
        sharded_ranks.check_transforms(0, ["fsdp", "tensor"], ["even"])
