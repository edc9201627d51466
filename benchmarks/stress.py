"""Cause a thousand failures and a hundred forks, and check that nothing is left behind.

Left behind would be a process (also one that a term has started), a thread, an open file or a file
in memory. The failures are of every kind that a term can have, and the deaths of idle workers and
of the fork server, which no term must notice.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
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
from steelyard.execution.workers import default_workers

FAULTS = 1000
KILLS = 40
FORKS = 100
MARK = "steelyard-stress-child"  # in the command line of processes that terms start
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


class UnreadableError(Exception):
    """An exception whose message cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def unreadable(_: Any, __: Any) -> Tensor:
    raise UnreadableError


def stop(_: Any, __: Any) -> Tensor:
    raise SystemExit(1)


def start_and_ignore(_: Any, __: Any) -> Tensor:
    """Start a process, ignore SIGTERM, and never return."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", MARK])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def write(_: Any, logprobs: list[Tensor]) -> Tensor:
    logprobs[0].data.add_(1.0)
    return logprobs[0].sum()


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
    (start_and_ignore, "process", 0.1),
    *((fn, place, None) for fn in (unreadable, stop) for place in ("inline", "thread", "process")),
    (write, "inline", None),
]


def footprint() -> tuple[int, int, int, int]:
    """Numbers of processes, threads, open files, and processes that terms have started."""
    process = psutil.Process()
    children = process.children(recursive=True)
    started = [p for p in psutil.process_iter(["cmdline"]) if MARK in (p.info["cmdline"] or ())]
    return len(children), threading.active_count(), process.num_fds(), len(started)


def kill_idle(server: bool) -> None:
    """Kill an idle worker, or the fork server; the next terms must not fail for it."""
    alive = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    servers = [p for p in alive if any("forkserver" in part for part in p.cmdline())]
    workers = [worker for each in servers for worker in each.children()]
    victims = servers if server else workers
    if victims:
        victims[0].kill()


def fork() -> None:
    """Compute process terms in a forked child, which must end by itself."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            healthy()
            code = 0
        finally:
            default_workers().close()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


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
        if rng.random() < KILLS / FAULTS:
            kill_idle(server=rng.random() < 1 / 4)
            healthy()
    for _ in track(range(FORKS), description="forks", console=CONSOLE):
        fork()
    healthy()
    deadline = time.monotonic() + 30
    while footprint() != before and time.monotonic() < deadline:
        time.sleep(0.2)
        healthy()
    after = footprint()
    CONSOLE.print(f"{seen.total()} faults: {dict(seen)}")
    CONSOLE.print(f"{FORKS} forks, and about {KILLS} idle workers and fork servers killed")
    CONSOLE.print(f"processes, threads, files, started by terms: before {before}, after {after}")
    if seen.total() != FAULTS or after != before:
        sys.exit("a process, thread or file is left, or a failure was not reported")


if __name__ == "__main__":
    main()
