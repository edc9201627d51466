"""Cost of dispatching to threads and processes, and the speedup of offloaded terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Timing, each, faster, in_turn, show, takes
from steelyard import Pipeline, RegularizerSpec
from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.workers import Workers

TRIPS, ROUNDS = 500, 5


def identity(payload: object) -> object:
    return payload


def base(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0].sum()


def count(_: Any, logprobs: list[Tensor]) -> Tensor:
    """Term in pure Python, which holds the GIL all the time."""
    total = 0
    for i in range(3_000_000):
        total += i & 1
    return logprobs[0].sum() * (total > 0)


def round_trip(workers: Workers, place: Any, payload: object, reply_bytes: int = 0) -> Timing:
    """Time to run `identity` in workers that are already started, and to get its result."""

    def once() -> None:
        ticket = Ticket("identity", place, identity, (payload,), 30.0, reply_bytes=reply_bytes)
        with Batch([ticket], workers.executors, 2) as batch:
            for settled in batch.settled():
                settled.result()

    return each(once, repeats=TRIPS, warmup=50)


def speedup(terms: int = 6) -> Timing:
    """Time of six CPU-bound terms one after the other, against the same in processes."""
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
        repeats=ROUNDS,
        warmup=1,
    )
    return timings["sequential"]


def main() -> None:
    """Measure and print."""
    megabyte = torch.zeros(1_000_000 // 4)
    with Workers() as workers:
        thread = round_trip(workers, "thread", 1)
        process = round_trip(workers, "process", 1)
        large = round_trip(workers, "process", megabyte, megabyte.nbytes)
    show(
        "Execution",
        "Warm dispatch and overlap",
        [
            takes("thread, round trip", thread, 1e-4),
            takes("process, small payload", process, 1e-3),
            takes("process, 1 MB tensor, round trip", large, 4e-3),
            faster("six pure-Python terms in processes, against one by one", speedup(), 1.8),
        ],
        repeats=f"{TRIPS} dispatches, {ROUNDS} overlap",
    )


if __name__ == "__main__":
    main()
