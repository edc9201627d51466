"""Options for runs on Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.cli.compare import ray_cluster
from steelyard.experiment import RayCluster

from .command import CommandRunner


def test_without_an_address_there_is_no_cluster() -> None:
    assert ray_cluster(None, 1, None, None) is None
    assert ray_cluster("auto", 2, 0.5, 8) == RayCluster("auto", cpus=2, gpus=0.5, memory=8)


@pytest.mark.parametrize("name", ["ablate", "tune"])
def test_an_address_of_another_form_is_an_error_of_usage(
    command: CommandRunner, project: Path, name: str
) -> None:
    done = command.run(name, "c.toml", "--run", "r", "--ray", "somewhere", cwd=project)
    assert done.code == 2
    assert "the address of a Ray cluster must be 'auto', 'HOST:6379' on a node" in done.err
    assert not (project / "r").exists()
