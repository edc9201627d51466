"""Faults of worker processes: each ends one task, and nothing is left behind."""

from __future__ import annotations

import ctypes
import multiprocessing.spawn
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from steelyard.errors import ClosedError, TermTimeoutError, UnpicklableError, WorkerDiedError
from steelyard.execution import Batch, Ticket, Workers, check_picklable
from steelyard.execution.transport import _MEMORY


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(processes=2) as workers:
        yield workers


def run(workers: Workers, *tickets: Ticket) -> None:
    with Batch(tickets, workers.executors, 2) as batch:
        list(batch.settled())


def job(fn: Any, *args: Any, timeout: float = 20.0) -> Ticket:
    return Ticket(getattr(fn, "__name__", "term"), "process", fn, args, timeout)


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
    assert time.monotonic() - began < 10.0  # warm and idle it is 0.5
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


def test_thirty_faults_leave_nothing_behind(workers: Workers) -> None:
    def settle() -> tuple[int, int, int]:
        run(workers, *(job(me) for _ in range(6)))
        return footprint()

    before = settle()
    for i in range(10):
        faults = [job(loop_for_ever, timeout=0.05), job(exit_at_once), job(segfault)]
        run(workers, *faults)
        assert all(fault.error is not None for fault in faults), i
    deadline = time.monotonic() + 20
    while not at_most(settle(), before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert at_most(settle(), before)


def wait_until(true: Callable[[], bool], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def announce_and_loop(path: Path, _: object = None) -> None:
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    loop_for_ever()


def test_closing_kills_busy_and_idle_workers(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    workers = Workers(processes=2)
    blocks = set(_MEMORY.glob("steelyard-*"))
    busy = job(announce_and_loop, tmp_path / "pid", torch.ones(100_000))
    with Batch([busy], workers.executors, 2):
        wait_until((tmp_path / "pid").exists, within=30)
        workers.close()
        assert set(_MEMORY.glob("steelyard-*")) <= blocks
        workers.close()
        with pytest.raises(ClosedError, match="closed while a term ran"):
            busy.result()
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    # What is left is multiprocessing's own bookkeeper, if this was its first use.
    assert int((tmp_path / "pid").read_text()) not in left
    assert len(left) <= 1


def test_a_cancelled_task_is_killed(workers: Workers, tmp_path: Path) -> None:
    with Batch([job(announce_and_loop, tmp_path / "pid")], workers.executors, 2):
        wait_until((tmp_path / "pid").exists, within=30)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not psutil.pid_exists(pid))


def test_an_error_carries_the_traceback_of_the_worker(workers: Workers) -> None:
    def outer() -> None:
        def inner() -> None:
            raise ValueError("deep down")

        inner()

    failing = job(outer)
    run(workers, failing)
    with pytest.raises(ValueError, match="deep down") as caught:
        failing.result()
    assert "In the worker process" in caught.value.__notes__[0]
    assert "in inner" in caught.value.__notes__[0]


def test_an_error_that_does_not_pickle_still_arrives(workers: Workers) -> None:
    def fail() -> None:
        class OddError(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("not me")

        raise OddError("odd one")

    failing = job(fail)
    run(workers, failing)
    with pytest.raises(RuntimeError, match="OddError: odd one"):
        failing.result()


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


class OnlyHere:
    """Pickles, and does not unpickle in another process."""

    home = os.getpid()

    def __reduce__(self) -> Any:
        return _at_home, (os.getpid(),)


def _at_home(home: int) -> OnlyHere:
    if os.getpid() != home:
        raise LookupError("far from home")
    return OnlyHere()


def test_what_cannot_be_rebuilt_over_there(workers: Workers) -> None:
    thing = OnlyHere()
    failing = job(lambda: thing)
    run(workers, failing)
    with pytest.raises(UnpicklableError, match="LookupError: far from home"):
        failing.result()


def test_workers_see_the_modules_that_the_caller_sees(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(workers, job(me))
    (tmp_path / "late_module.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)

    def use() -> int:
        import late_module  # type: ignore[import-not-found]  # noqa: PLC0415 - made above

        return int(late_module.answer())

    asking = job(use)
    run(workers, asking)
    assert asking.result() == 42


def test_workers_do_not_fight_over_cores(workers: Workers) -> None:
    asking = job(torch.get_num_threads)
    run(workers, asking)
    assert asking.result() == max(1, (os.cpu_count() or 1) // 2)


SCRIPT = """
import torch
from steelyard import Pipeline, RegularizerSpec
print("imported once")
factor = 2.0
def helper(x):
    return factor * x.sum()
def term(data, logprobs):
    return helper(logprobs[0])
specs = [RegularizerSpec(term, 1.0, "f", run_in="process"),
         RegularizerSpec(lambda d, lp: lp[0].sum(), 1.0, "l", run_in="process")]
output = Pipeline(lambda d, lp: lp[0].sum(), specs).compute([], [torch.ones(3)])
print(output.loss_total, output.gradients[0].tolist())
"""


@pytest.mark.parametrize("way", ["script", "command", "module"])
def test_scripts_without_a_guard(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = {"script": ["script.py"], "command": ["-c", SCRIPT], "module": ["-m", "script"]}
    done = subprocess.run(
        [sys.executable, *arguments[way]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "imported once\n12.0 [4.0, 4.0, 4.0]\n"
    assert done.stderr == ""


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, time, torch\n"
        "from steelyard import compute\n"
        "def announce(d, lp):\n"
        "    open('pid.new', 'w').write(str(os.getpid()))\n"
        "    os.rename('pid.new', 'pid')\n"
        "    time.sleep(100)\n"
        "spec = {'fn': announce, 'weight': 1, 'name': 'a', 'run_in': 'process'}\n"
        "compute([], [torch.ones(1)], lambda d, lp: lp[0].sum(), regularizers=[spec])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    wait_until((tmp_path / "pid").exists, within=60)
    worker = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not psutil.pid_exists(worker))


def test_other_processes_are_prepared_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("json.tool"))
    data = multiprocessing.spawn.get_preparation_data("other")
    assert data["init_main_from_name"] == "json.tool"


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
