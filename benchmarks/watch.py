"""The page of `steelyard watch`: the list of ten long runs, and one of them, by a new server."""

from __future__ import annotations

import json
import tempfile
from itertools import combinations
from pathlib import Path

import httpx
import numpy as np

from benchmarks.measure import Timing, each, show, takes
from steelyard.experiment.page.server import serve_page

RUNS, STEPS = 10, 10_000
TERMS = ("kl", "entropy", "l2", "drift", "judge", "parity", "topology")
FIELDS = ("value", "weight", "contribution", "grad_norm", "grad_norm_weighted", "duration")
REPEATS = 5


def write_run(folder: Path, seed: int) -> int:
    """Write the config and the metrics of a run; return the size of the metrics in bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"train": {"steps": STEPS}}))
    keys = [
        *("seconds", "loss_total", "base_loss/value", "base_loss/grad_norm", "total_grad_norm"),
        *(f"regularizers/{term}/{field}" for term in TERMS for field in FIELDS),
        *(f"cosines/{a}/{b}" for a, b in combinations(("base", *TERMS), 2)),
        *("optim/unclipped_grad_l2:mean", "optim/learning_rate"),
    ]
    spaces = {f"regularizers/{term}/grad_space": "logprobs" for term in TERMS}
    values = np.random.default_rng(seed).normal(size=(STEPS, len(keys)))
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step, row in enumerate(values.tolist()):
            line = {"step": step, "time": 1.8e9 + step / 3, **dict(zip(keys, row, strict=True))}
            file.write(f"{json.dumps(line | spaces)}\n")
    return (folder / "metrics.jsonl").stat().st_size


def time_request(folder: Path, path: str) -> Timing:
    """Time a request to a server that has read nothing yet."""

    def once() -> None:
        with serve_page(folder) as page, httpx.Client(timeout=60) as client:
            client.get(page.url(), follow_redirects=True).raise_for_status()
            client.get(f"{page.base_url}{path}").raise_for_status()

    return each(once, repeats=REPEATS, warmup=1)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = sum(write_run(folder / f"run-{seed}", seed) for seed in range(RUNS))
        rows = [
            takes("list of the runs", time_request(folder, "/api/runs"), 1.0),
            takes("charts of one run", time_request(folder, "/api/run?run=run-0"), 2.0),
        ]
    show(
        "The page of steelyard watch",
        f"{RUNS} runs of {STEPS:,} steps and {len(TERMS)} terms, {size / 1e6:.0f} MB",
        rows,
        repeats=str(REPEATS),
        notes=["Start and stop of the server are included, and two requests for the token."],
    )


if __name__ == "__main__":
    main()
