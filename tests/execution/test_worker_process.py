from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.errors import UnpicklableError
from steelyard.execution import worker_process
from steelyard.execution.transport import pack, unpack
from steelyard.execution.workers import Workers

from .tickets import ended, job, run, wait_until


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


def test_what_cannot_be_rebuilt_over_there(workers: Workers) -> None:
    thing = OnlyHere()
    failing = job(lambda: thing)
    run(workers, failing)
    with pytest.raises(UnpicklableError, match="LookupError: far from home"):
        failing.result()


def test_workers_see_the_modules_that_the_caller_sees(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(workers, job(os.getpid))
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


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import os, time, torch\n"
        "from steelyard import compute\n"
        "def announce(d, lp):\n"
        "    open('pid.new', 'w').write(str(os.getpid()))\n"
        "    os.rename('pid.new', 'pid')\n"
        "    time.sleep(1000)\n"
        "spec = {'fn': announce, 'weight': 1, 'name': 'a', 'run_in': 'process', 'timeout': 300}\n"
        "compute([], [torch.ones(1)], lambda d, lp: lp[0].sum(), regularizers=[spec])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    wait_until((tmp_path / "pid").exists)
    worker = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: ended(worker))


class OnlyHere:
    """Pickles, and does not unpickle in another process."""

    home = os.getpid()

    def __reduce__(self) -> Any:
        return _at_home, (os.getpid(),)


def _at_home(home: int) -> OnlyHere:
    if os.getpid() != home:
        raise LookupError("far from home")
    return OnlyHere()


def test_a_task_of_ray_tells_that_it_starts_and_then_answers() -> None:
    data, large = {"a": 1}, torch.ones(100_000)

    def fn(data: dict[str, int], large: torch.Tensor, add: int) -> float:
        return data["a"] + float(large.sum()) + add

    call = pack((fn, (data, large, 5)), [data, large])
    steps = worker_process.work_in_task(call, [pack(data), None], pack(large))
    assert next(steps) is None
    succeeded, parts = next(steps)
    assert (succeeded, unpack(parts)) == (True, 100_006.0)
    assert next(steps, "end") == "end"


def test_a_task_of_ray_answers_with_the_error() -> None:
    def fail() -> None:
        raise KeyError("here")

    _, (succeeded, parts) = worker_process.work_in_task(pack((fail, ())), [])
    assert not succeeded
    assert repr(unpack(parts)) == "KeyError('here')"
