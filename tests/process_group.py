"""Run a function in every process of a gloo group, with a time limit around the whole group.

A server process imports torch once and forks for each rank, so that a group of four starts in a
second. Nothing hangs: if one rank fails or the time is up, all are killed, and what they wrote is
in the failure.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

# Generous: a loaded machine must not fail a test. A hang is what it is for.
TIMEOUT = 300.0
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "pytest",
        "steelyard.composition",
        "steelyard.integrations.optim",
        "steelyard.penalties.from_logits",
        "torch._dynamo",  # FSDP loads it in the first forward pass
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
    ]
)


def run_group(
    fn: Callable[..., Any], folder: Path, *args: Any, ranks: int = 2, timeout: float = TIMEOUT
) -> list[Any]:
    """Call `fn(rank, *args)` in each of `ranks` processes that form a gloo group.

    Args:
        fn: a function of a module, which the processes import.
        folder: an empty one, for the meeting of the processes, their output and their results.
        args: further arguments; they are pickled.
        ranks: number of processes.
        timeout: seconds for the whole group.

    Returns:
        The results by rank, as `torch.save` stores them.

    Raises:
        AssertionError: a rank failed, or the time was up; with the output of all ranks.
    """
    port = _free_port()
    processes = [
        _SERVER.Process(target=_run_rank, args=(fn, rank, ranks, folder, port, args), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        failed = _wait_for(processes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failed is not None:
        said = "\n".join(
            f"--- rank {rank} ---\n{_output(folder, rank).read_text(errors='replace')}"
            for rank in range(ranks)
            if _output(folder, rank).exists()
        )
        raise AssertionError(f"{fn.__name__} with {ranks} ranks: {failed}\n{said}")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


@contextmanager
def group_of_one(folder: Path, backend: str = "gloo") -> Iterator[None]:
    """Make this process a group of one within the `with` block."""
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(backend, init_method=meeting, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def count_reductions() -> Iterator[dict[str, int]]:
    """Count the collective operations that this process calls within the `with` block, by name."""
    names = ("all_gather", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
    before, counts = {name: getattr(dist, name) for name in names}, dict[str, int]()

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counted(name))
    try:
        yield counts
    finally:
        for name, own in before.items():
            setattr(dist, name, own)


def _wait_for(processes: Sequence[ForkServerProcess], timeout: float) -> str | None:
    """Wait until all have ended well, or one has not; the reason in the second case."""
    until = time.monotonic() + timeout
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        left = until - time.monotonic()
        ended = wait(list(running), timeout=max(left, 0.0))
        if not ended:
            return f"ranks {sorted(running.values())} had not ended after {timeout:.0f} s"
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[arg-type]  # typed as any waitable object
            processes[rank].join()
            if processes[rank].exitcode != 0:
                return f"rank {rank} ended with the exit code {processes[rank].exitcode}"
    return None


def _run_rank(
    fn: Callable[..., Any], rank: int, ranks: int, folder: Path, port: int, args: tuple[Any, ...]
) -> None:
    written = os.open(_output(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    torch.set_num_threads(1)
    # What trainers read to find that they are one of several.
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'meeting'}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=TIMEOUT),
        )
        gc.freeze()  # trainers collect garbage often, and all that is imported is none
        torch.save(fn(rank, *args), folder / f"{rank}.pt")
        # Without it the others might still be in a collective operation with this one.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - the parent reports whatever it was
        traceback.print_exc()
        os._exit(1)


def _output(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.log"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
