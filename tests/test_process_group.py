"""The helper that runs groups of processes: results, failures with their output, no hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from .process_group import run_group


def add_up(rank: int, start: float) -> float:
    number = torch.tensor(start + rank)
    dist.all_reduce(number)
    return number.item()


def fail_alone(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 says why")
    dist.barrier()


def wait_alone(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        dist.recv(torch.zeros(1), src=0)


def test_results_by_rank(tmp_path: Path) -> None:
    assert run_group(add_up, tmp_path, 1.0, ranks=2) == [3.0, 3.0]


def test_a_failure_ends_the_group_and_shows_what_was_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 ended with the exit code 1(.|\n)*says why"):
        run_group(fail_alone, tmp_path)


def test_ranks_that_wait_for_each_other_are_killed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] had not ended after 2 s"):
        run_group(wait_alone, tmp_path, timeout=2)
