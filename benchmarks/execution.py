"""Dispatch to threads and processes, and what running apart gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import each, in_turn, show
from steelyard import Pipeline, RegularizerSpec
from steelyard.execution import Batch, Ticket, Workers


def nothing(thing: object) -> object:
    return thing


def base(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0].sum()


def count(_: Any, logprobs: list[Tensor]) -> Tensor:
    """Pure Python: it holds the interpreter's lock all the time."""
    total = 0
    for i in range(3_000_000):
        total += i & 1
    return logprobs[0].sum() * (total > 0)


def round_trip(workers: Workers, lane: Any, payload: object, reply_bytes: int = 0) -> float:
    """Median seconds to run `nothing` in a lane that is warm."""

    def once() -> None:
        ticket = Ticket("nothing", lane, nothing, (payload,), 30.0, reply_bytes=reply_bytes)
        with Batch([ticket], workers.executors, {}) as batch:
            for settled in batch.settled():
                settled.result()

    return each(once, repeats=500, warmup=50)


def speedup(terms: int = 6, repeats: int = 3) -> float:
    """How much faster six CPU-bound terms are in processes than one after the other."""
    logprobs = [torch.ones(8)]

    def pipeline(run_in: Any) -> Pipeline:
        specs = [RegularizerSpec(count, 1.0, f"t{i}", run_in=run_in) for i in range(terms)]
        return Pipeline(base, specs)

    inline, processes = pipeline("inline"), pipeline("process")
    timings = in_turn(
        {
            "processes": lambda: processes.compute([], logprobs),
            "sequential": lambda: inline.compute([], logprobs),
        },
        repeats=repeats,
        warmup=1,
    )
    return timings["sequential"].ratio


def main() -> None:
    """Measure and print."""
    megabyte = torch.zeros(1_000_000 // 4)
    with Workers() as workers:
        thread = round_trip(workers, "thread", 1) * 1e3
        process = round_trip(workers, "process", 1) * 1e3
        large = round_trip(workers, "process", megabyte, megabyte.nbytes) * 1e3
    faster = speedup()
    show(
        "Execution: warm dispatch and overlap",
        [
            ("thread, there and back", f"{thread:.3f} ms", "<= 0.1 ms", thread <= 0.1),
            ("process, small payload", f"{process:.2f} ms", "<= 1.0 ms", process <= 1.0),
            ("process, 1 MB tensor there and back", f"{large:.2f} ms", "<= 4 ms", large <= 4.0),
            (
                "six pure-Python terms in processes against one after the other",
                f"{faster:.2f} x faster",
                ">= 1.8 x (two cores)",
                faster >= 1.8,
            ),
        ],
    )


if __name__ == "__main__":
    main()
