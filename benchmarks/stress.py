"""Cause a thousand failures in a row, and check that no process, thread or file is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import psutil
import torch
from rich.progress import track
from torch import Tensor

from benchmarks.measure import CONSOLE
from steelyard import Pipeline, RegularizerSpec
from steelyard.errors import TermError

FAULTS = 1000
LOGPROBS = [torch.zeros(16)]


def base(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0].sum()


def loop(_: Any, __: Any) -> Tensor:
    while True:
        pass


def leave(_: Any, __: Any) -> Tensor:
    os._exit(1)


def crash(_: Any, logprobs: list[Tensor]) -> Tensor:
    os.kill(os.getpid(), signal.SIGSEGV)
    return logprobs[0].sum()


def fail(_: Any, __: Any) -> Tensor:
    raise ValueError("on purpose")


async def wait(_: Any, logprobs: list[Tensor]) -> Tensor:
    await asyncio.sleep(60)
    return logprobs[0].sum()


def late(_: Any, logprobs: list[Tensor]) -> Tensor:
    time.sleep(0.06)
    return logprobs[0].sum()


KINDS: list[tuple[Any, str, float | None]] = [
    (loop, "process", 0.05),
    (leave, "process", None),
    (crash, "process", None),
    (fail, "process", None),
    (fail, "thread", None),
    (wait, "async", 0.02),
    (late, "thread", 0.02),
]


def footprint() -> tuple[int, int, int, int]:
    """Numbers of processes, threads, open files and shared-memory blocks."""
    process = psutil.Process()
    blocks = [n for n in os.listdir("/dev/shm") if n.startswith("steelyard-")]  # noqa: PTH208
    children = process.children(recursive=True)
    return len(children), threading.active_count(), process.num_fds(), len(blocks)


async def quick(data: Any, logprobs: list[Tensor]) -> Tensor:
    return base(data, logprobs)


def healthy() -> None:
    """Check that every place to run terms works, with two terms at a time."""
    ways = [(base, "thread"), (base, "process"), (quick, "async")] * 2
    specs = [
        RegularizerSpec.from_dict({"fn": fn, "weight": 1.0, "name": f"{way}{i}", "run_in": way})
        for i, (fn, way) in enumerate(ways)
    ]
    assert Pipeline(base, specs).compute([], LOGPROBS).loss_total == 0.0


def main() -> None:
    for _ in range(20):
        healthy()
    before, seen = footprint(), Counter[str]()
    rng = random.Random(0)
    for _ in track(range(FAULTS), description="faults", console=CONSOLE):
        fn, run_in, timeout = rng.choice(KINDS)
        fields = {"fn": fn, "weight": 1.0, "name": fn.__name__, "run_in": run_in}
        try:
            Pipeline(base, [{**fields, "timeout": timeout}]).compute([], LOGPROBS)
        except TermError as error:
            seen[type(error).__name__] += 1
        healthy()
    deadline = time.monotonic() + 30
    while footprint() != before and time.monotonic() < deadline:
        time.sleep(0.2)
        healthy()
    after = footprint()
    CONSOLE.print(f"{seen.total()} faults: {dict(seen)}")
    CONSOLE.print(f"processes, threads, files, blocks: before {before}, after {after}")
    if seen.total() != FAULTS or after != before:
        sys.exit("a process, thread, file or block is left, or a failure was not reported")


if __name__ == "__main__":
    main()
