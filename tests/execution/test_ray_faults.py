"""Faults of Ray itself, on a cluster of its own: a full object store, a raylet that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import PlacementError, WorkerDiedError
from steelyard.execution.executor import Batch
from steelyard.execution.workers import Workers
from tests.ray_cluster import ENVIRONMENT, RayCluster

from .test_ray_tasks import OTHER, job, me, started, tell_and_wait
from .tickets import run, wait_until

SCRIPT = """
import psutil, ray
import numpy as np
from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.workers import Workers

def size(x):
    return x.nbytes

def zeros(n):
    return np.zeros(n, np.uint8)

def run(fn, *args, shared=()):
    ticket = Ticket(fn.__name__, "ray", fn, args, 300, shared=shared)
    with Batch([ticket], workers.executors, 1) as batch:
        list(batch.settled())
    try:
        line = str(ticket.result())
    except Exception as error:
        line = f"{type(error).__name__} " + " ".join(str(error).split())
    print(line, flush=True)
    return line

# The disk counts as full.
system = {"local_fs_capacity_threshold": 1e-6}
ray.init("local", num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False,
         log_to_driver=False, _system_config=system)
large = zeros(200 * 2**20)
with Workers(processes=1) as workers:
    run(size, large, shared=(large,))
    run(size, large)
    run(zeros, 200 * 2**20)
    run(size, zeros(8))
    children = psutil.Process().children(recursive=True)
    (raylet,) = [p for p in children if psutil.pid_exists(p.pid) and p.name() == "raylet"]
    raylet.kill()
    raylet.wait()
    # A worker that Ray has leased for such tasks may answer a few more, and then end in one.
    while not run(size, zeros(8)).startswith("WorkerDiedError Ray must live"):
        pass
"""


def test_a_full_object_store_and_a_dead_raylet_are_named_with_their_cure(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    full = "TermError Ray's object store must have room for the data and the result of regularizer"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("Term", "Work", "8"))]
    for line, name in zip(lines[:3], ("size", "size", "zeros"), strict=True):
        assert line.startswith(f"{full} '{name}', and it is full, on disk too: free space"), line
    assert lines[3] == "8", "and then it goes on"
    assert lines[-1].startswith(
        "WorkerDiedError Ray must live on this machine while regularizer 'size' runs on it"
    ), done.stderr
    for line in lines[4:-1]:
        assert line == "8" or line.startswith("WorkerDiedError"), line


def test_a_raylet_that_is_killed_takes_the_tasks_of_its_node_along_alone(
    workers: Workers, ray_driver: RayCluster, tmp_path: Path
) -> None:
    """The process of a task outlives it: Ray says so when the task ends, by its timeout at last."""
    doomed = {"doomed": 1}
    node = ray_driver.add_node(num_cpus=1, resources=doomed)
    lost = job(tell_and_wait, tmp_path, resources=doomed)
    neighbour = job(tell_and_wait, tmp_path, "neighbour", resources=OTHER)
    try:
        with Batch([lost, neighbour], workers.executors, 2) as batch:
            wait_until(lambda: all(started(tmp_path / name) for name in ("pid", "neighbour")))
            ray_driver.kill_raylet(node)
            (tmp_path / "go").touch()
            assert set(batch.settled()) == {lost, neighbour}
        with pytest.raises(WorkerDiedError, match="it or its node died"):
            lost.result()
        assert neighbour.result() > 0
        unplaced, later = job(me, resources=doomed), job(me)
        run(workers, unplaced, later)
        assert later.result() > 0
        with pytest.raises(PlacementError, match="asks for, and none does: CPU 1, doomed 1"):
            unplaced.result()
    finally:
        ray_driver.kill_node(node)
