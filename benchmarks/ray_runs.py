"""Runs on a Ray cluster of two local nodes, against the same runs on this machine."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from benchmarks.measure import Row, Timing, against, show, takes
from steelyard.experiment import Config, RayCluster, RunFolder, read_config, train
from steelyard.experiment.compare.ray_runs import RayRuns, open_runs
from steelyard.experiment.compare.runs import run_together
from steelyard.experiment.data.base_model_outputs import share_reference_logprobs
from steelyard.experiment.run.log import SilentWatcher

STEPS, REPEATS, RUNS = 100, 3, 4
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 200 * 2**20}


def predicted(runs: int, places: int, *, start: float, seconds: float) -> float:
    """Seconds of several runs: the cluster trains them in rounds of as many as it has places."""
    return math.ceil(runs / places) * (start + seconds)


@contextmanager
def cluster() -> Iterator[str]:
    """Address of two nodes that take one run each."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    head = {**NODE, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=head)
    try:
        started.add_node(**NODE)
        yield started.address
    finally:
        started.shutdown()  # type: ignore[no-untyped-call]  # untyped in Ray


def config(folder: Path) -> Config:
    lines = [{"prompt": f"{n} plus one is", "completion": f" {n + 1}."} for n in range(64)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    raw = {
        "model": {"base_model": "tiny-random", "device": "cpu"},
        "data": {"path": "train.jsonl", "held_out": 0.1},
        "train": {"steps": STEPS, "save_every": 10},
        "regularizers": [{"use": "l2", "name": "l2", "weight": 0.1}],
    }
    return read_config(raw, folder=folder)


def step_seconds(run: Path) -> float:
    """Seconds of a step, with what is written between steps."""
    lines = RunFolder(run).metrics()
    passed: float = lines[-1]["time"] - lines[0]["time"]
    return passed / (len(lines) - 1)


def paired(runs: RayRuns, settings: Config, folder: Path) -> tuple[Timing, Timing, float]:
    """Steps on Ray against steps here, the seconds to the first step, and those of a run."""
    here, there, starts, wholes = [], [], [], []
    for number in range(REPEATS):
        train(settings, folder / f"here-{number}")
        here.append(step_seconds(folder / f"here-{number}"))
        path, began = folder / f"there-{number}", time.time()
        runs.train(settings, path, SilentWatcher, lambda: False)
        wholes.append(time.time() - began)
        there.append(step_seconds(path))
        starts.append(RunFolder(path).metrics()[0]["time"] - began)
    steps = Timing(there, [a / b for a, b in zip(there, here, strict=True)])
    return steps, Timing(starts, starts), sorted(wholes)[len(wholes) // 2]


def together(runs: RayRuns, settings: Config, folder: Path) -> float:
    """Seconds of several runs that are submitted at once."""

    def task(number: int) -> Callable[[Callable[[], bool]], None]:
        def run(stop: Callable[[], bool]) -> None:
            runs.train(settings, folder / f"together-{number}", SilentWatcher, stop)

        return run

    began = time.perf_counter()
    run_together([task(number) for number in range(RUNS)], RUNS, lambda: False)
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as made, cluster() as address:
        folder = Path(made)
        settings = config(folder)
        share_reference_logprobs(folder / "results")
        with open_runs(RayCluster(address), settings, folder / "results") as runs:
            steps, starts, whole = paired(runs, settings, folder / "results")
            measured = together(runs, settings, folder / "results")
    expected = predicted(RUNS, 2, start=0.0, seconds=whole)
    ratio = Timing([measured] * 2, [measured / expected] * 2)
    rows: list[Row] = [
        against("a step, against one here", steps, 1.3),
        takes("from submitting a run to its first step", starts, 10.0),
        against(f"{RUNS} runs on 2 places, against 2 rounds of one run", ratio, 1.5),
    ]
    show("Runs on Ray", "Two local nodes of one CPU each", rows, repeats=str(REPEATS))


if __name__ == "__main__":
    main()
