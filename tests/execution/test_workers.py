from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ClosedError, MissingExtraError, SpecError
from steelyard.execution.workers import Workers, default_workers


@pytest.mark.parametrize("processes", [0, -1, 1.5, True, "2"])
def test_a_bad_number_of_processes(processes: Any) -> None:
    with pytest.raises(SpecError, match="processes must be a whole number >= 1, got"):
        Workers(processes=processes)


def test_closed_workers_say_so() -> None:
    workers = Workers()
    workers.close()
    with pytest.raises(ClosedError, match="these workers must be open"):
        _ = workers.executors


def test_ray_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with Workers(processes=1) as workers, pytest.raises(MissingExtraError) as caught:
        workers.executors["ray"].prepare("judge", print)
    assert str(caught.value) == (
        "run_in='ray' needs ray, which is not installed: pip install \"steelyard[ray]\"."
    )


def test_a_forked_child_has_workers_of_its_own() -> None:
    parents = default_workers()
    assert default_workers() is parents
    pid = os.fork()
    if pid == 0:
        os._exit(0 if default_workers() is not parents else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert default_workers() is parents


def test_the_interpreter_exits_at_once_whatever_still_runs() -> None:
    script = (
        "import time, torch\n"
        "from steelyard import compute\n"
        "spec = {'fn': lambda d, lp: time.sleep(3600), 'weight': 1, 'name': 's',\n"
        "        'run_in': 'thread', 'timeout': 0.1, 'on_error': 'skip'}\n"
        "out = compute([], [torch.ones(1)], lambda d, lp: lp[0].sum(), regularizers=[spec])\n"
        "print(out.skipped['s'][:16])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout == "TermTimeoutError\n"


# A pool is watched often, so that one which ends with the program would be taken for a broken one.
CHILD = """
import multiprocessing, os, sys, torch
from steelyard import Pipeline, RegularizerSpec, Workers
from steelyard.execution import processes

processes._WATCH_INTERVAL = 0.001

def double(x):
    return 2 * x.sum()

def term(data, logprobs):
    return double(logprobs[0])

def base(data, logprobs):
    return logprobs[0].sum()

def compute(workers=None):
    spec = RegularizerSpec(term, 1.0, "t", run_in="process")
    print(Pipeline(base, [spec], workers=workers).compute([], [torch.ones(3)]).loss_total)
    sys.stdout.flush()

def run_child(name, used):
    print(name, used)
    sys.stdout.flush()
    if name == "os.fork":
        pid = os.fork()
        if not pid:
            compute()
            compute(workers)
            sys.exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    else:
        child = multiprocessing.get_context(name).Process(target=compute)
        child.start()
        child.join()
        print(child.exitcode)

if __name__ == "__main__":
    workers = Workers(processes=1)
    if sys.argv[1:] == ["unused"]:
        spec = RegularizerSpec(term, 1.0, "t", run_in="process")
        pipelines = [Pipeline(base, [spec], workers=each) for each in (None, workers)]
        sys.exit()
    for name in ("spawn", "fork", "os.fork"):
        run_child(name, "new")
    compute()
    compute(workers)
    for name in ("fork", "os.fork"):
        run_child(name, "used")
"""


def run_script(folder: Path, *arguments: str) -> list[str]:
    """Lines that the script prints."""
    (folder / "script.py").write_text(CHILD)
    # From Python 3.12 on, a fork in a process with threads warns.
    unwarned = ("-W", "ignore:This process:DeprecationWarning")
    done = subprocess.run(
        [sys.executable, *unwarned, "script.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_workers_that_were_not_used_end(tmp_path: Path) -> None:
    assert run_script(tmp_path, "unused") == []


def test_a_child_process_runs_process_terms_and_ends(tmp_path: Path) -> None:
    assert run_script(tmp_path) == [
        *("spawn new", "9.0", "0"),
        *("fork new", "9.0", "0"),
        *("os.fork new", "9.0", "9.0", "7"),
        *("9.0", "9.0"),
        *("fork used", "9.0", "0"),
        *("os.fork used", "9.0", "9.0", "7"),
    ]
