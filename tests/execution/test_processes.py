"""Faults of worker processes: each ends one task, and nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from steelyard.errors import ClosedError, TermTimeoutError, UnpicklableError, WorkerDiedError
from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.processes import ProcessExecutor, check_picklable
from steelyard.execution.workers import Workers

from .tickets import ended, job, memory_files, run, wait_until


def loop_for_ever() -> None:
    while True:
        pass


def sleep_in_c() -> None:
    ctypes.CDLL(None).sleep(60)


def exit_at_once() -> None:
    os._exit(7)


def segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def me() -> int:
    return os.getpid()


@pytest.mark.parametrize("fault", [loop_for_ever, sleep_in_c])
def test_a_term_that_never_ends_is_killed(workers: Workers, fault: Any) -> None:
    warm = job(me)
    run(workers, warm)
    slow, neighbour = job(fault, timeout=0.3), job(me)
    began = time.monotonic()
    run(workers, slow, neighbour)
    assert time.monotonic() - began < 50.0  # idle it is 0.5; `sleep_in_c` ends after 60
    with pytest.raises(TermTimeoutError):
        slow.result()
    assert psutil.pid_exists(neighbour.result())
    after = job(me)
    run(workers, after)
    assert after.result() > 0


@pytest.mark.parametrize(
    ("fault", "how"), [(exit_at_once, "exit code 7"), (segfault, "signal SIGSEGV")]
)
def test_a_worker_that_dies_takes_one_task_along(workers: Workers, fault: Any, how: str) -> None:
    dying, neighbour = job(fault), job(me)
    run(workers, dying, neighbour)
    assert neighbour.result() > 0
    with pytest.raises(WorkerDiedError, match=rf"regularizer '{fault.__name__}' .* died of {how}"):
        dying.result()
    after = job(me)
    run(workers, after)
    assert after.result() > 0


def test_a_worker_that_dies_idle_does_no_harm() -> None:
    with Workers(processes=1) as workers:
        first = job(me)
        run(workers, first)
        os.kill(first.result(), signal.SIGKILL)
        for _ in range(3):
            after = job(me)
            run(workers, after)
            assert after.result() != first.result()


def footprint() -> tuple[int, int, int]:
    process = psutil.Process()
    return len(process.children(recursive=True)), threading.active_count(), process.num_fds()


def at_most(now: tuple[int, int, int], then: tuple[int, int, int]) -> bool:
    # Fewer is fine: a thread that another test left stuck may have ended meanwhile.
    return all(a <= b for a, b in zip(now, then, strict=True))


def test_nine_faults_leave_nothing_behind(workers: Workers) -> None:
    def settle() -> tuple[int, int, int]:
        run(workers, *(job(me) for _ in range(6)))
        return footprint()

    before = settle()
    for i in range(3):
        faults = [job(loop_for_ever, timeout=0.05), job(exit_at_once), job(segfault)]
        run(workers, *faults)
        assert all(fault.error is not None for fault in faults), i
    wait_until(lambda: at_most(settle(), before))


def announce_and_loop(path: Path, _: object = None) -> None:
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    loop_for_ever()


def test_closing_kills_busy_and_idle_workers(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    workers = Workers(processes=2)
    files = memory_files()
    busy = job(announce_and_loop, tmp_path / "pid", torch.ones(100_000))
    with Batch([busy], workers.executors, 2):
        wait_until((tmp_path / "pid").exists)
        workers.close()
        assert memory_files() <= files
        workers.close()
        with pytest.raises(ClosedError, match="closed while a term ran"):
            busy.result()
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    # What is left is multiprocessing's own bookkeeper, if this was its first use.
    assert int((tmp_path / "pid").read_text()) not in left
    assert len(left) <= 1


def test_a_cancelled_task_is_killed(workers: Workers, tmp_path: Path) -> None:
    with Batch([job(announce_and_loop, tmp_path / "pid")], workers.executors, 2):
        wait_until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: ended(pid))


def test_a_task_that_is_cancelled_while_it_is_sent_is_killed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket, running_pool = job(loop_for_ever), workers.processes._running_pool

    def cancel_meanwhile(*broken: Any) -> Any:
        ticket.cancel()
        return running_pool(*broken)

    monkeypatch.setattr(workers.processes, "_running_pool", cancel_meanwhile)
    workers.processes.submit(ticket)
    wait_until(lambda: not ticket.running)


class WaitingPool:
    """Takes tasks and never runs them."""

    active = True

    def schedule(self, *_: object, **__: object) -> Future[Any]:
        return Future()


class YieldingTicket(Ticket):
    """Lets other threads run wherever it is looked up."""

    def __hash__(self) -> int:
        time.sleep(0)
        return id(self)


def test_closing_in_several_threads_ends_each_task_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, pool = ProcessExecutor(1), WaitingPool()
    monkeypatch.setattr(executor, "_running_pool", lambda *_: pool)
    tickets = [YieldingTicket("t", "process", me, ()) for _ in range(200)]
    for ticket in tickets:
        executor.submit(ticket)
    with ThreadPoolExecutor(4) as threads:
        for closing in [threads.submit(executor.close) for _ in range(4)]:
            closing.result()
    assert not any(ticket.running for ticket in tickets)


def test_what_cannot_travel(workers: Workers) -> None:
    lock = threading.Lock()
    with pytest.raises(UnpicklableError, match=r"must pickle.*regularizer 't'.*run_in='thread'"):
        check_picklable("t", lambda: lock)
    there, back = job(lambda: lock), job(threading.Lock)
    run(workers, there, back)
    with pytest.raises(UnpicklableError, match="the term or its data does not"):
        there.result()
    with pytest.raises(UnpicklableError, match="its result does not"):
        back.result()


def test_a_pool_that_cannot_start_fails_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no more processes")

    with Workers(processes=1) as workers:
        monkeypatch.setattr(workers.processes, "_running_pool", refuse)
        failing = job(me)
        run(workers, failing)
        with pytest.raises(OSError, match="no more processes"):
            failing.result()
        assert not failing.running


def start_and_loop(path: Path, how: str) -> None:
    """Start a process of its own, then never return."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".new").rename(path)
    if how == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif how == "reports SIGTERM":
        signal.signal(signal.SIGTERM, lambda *_: path.with_suffix(".asked").touch())
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "crashes":
        segfault()
    elif how == "in C":
        sleep_in_c()
    loop_for_ever()


def run_until_started(workers: Workers, path: Path, how: str) -> Ticket:
    """Run `start_and_loop` with a timeout in which it reaches its loop, on a slow machine too."""
    # One that crashes needs no timeout to end, and must not reach it before its crash is noticed.
    for timeout in (300.0,) if how == "crashes" else (1.0, 5.0, 25.0, 125.0):
        failing = job(start_and_loop, path, how, timeout=timeout)
        run(workers, failing)
        if path.exists():
            return failing
    pytest.fail("the term was never started")


@pytest.mark.parametrize("how", ["plain", "ignores SIGTERM", "stopped", "in C", "crashes"])
def test_processes_that_a_term_starts_end_with_it(
    workers: Workers, tmp_path: Path, how: str
) -> None:
    failing = run_until_started(workers, tmp_path / "pids", how)
    kind = WorkerDiedError if how == "crashes" else TermTimeoutError
    with pytest.raises(kind):
        failing.result()
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_until(lambda pid=pid: ended(pid))  # type: ignore[misc]  # mypy: lambda defaults


def test_a_worker_is_killed_and_not_asked_to_end(workers: Workers, tmp_path: Path) -> None:
    """Asking first would take pebble another 3 s, beyond the promised 1."""
    failing = run_until_started(workers, tmp_path / "pids", "reports SIGTERM")
    with pytest.raises(TermTimeoutError):
        failing.result()
    assert not (tmp_path / "pids.asked").exists()


def announce_and_wait(folder: Path) -> int:
    """Tell that it runs, and wait for a file."""
    (folder / f"{os.getpid()}.pid").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return os.getpid()


def test_a_term_is_run_again_if_the_fork_server_dies(tmp_path: Path) -> None:
    """It dies of something else than the term; the worker, which nothing controls now, ends."""
    with Workers(processes=1) as workers:
        waiting = job(announce_and_wait, tmp_path, timeout=200.0)
        with Batch([waiting], workers.executors, 1) as batch:
            wait_until(lambda: any(tmp_path.glob("*.pid")))
            (first,) = tmp_path.glob("*.pid")
            psutil.Process(int(first.stem)).parent().kill()
            wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
            (tmp_path / "go").touch()
            list(batch.settled())
        assert waiting.result() != int(first.stem)
        wait_until(lambda: ended(int(first.stem)))


def test_an_idle_worker_that_is_killed_fails_no_term(workers: Workers) -> None:
    pids = [job(os.getpid) for _ in range(6)]
    run(workers, *pids)
    for worker in {ticket.result() for ticket in pids}:
        os.kill(worker, signal.SIGKILL)
    again = [job(os.getpid) for _ in range(6)]
    run(workers, *again)
    assert {t.result() for t in again}.isdisjoint({t.result() for t in pids})
