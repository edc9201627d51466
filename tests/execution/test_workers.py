from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from steelyard.errors import ClosedError, SpecError
from steelyard.execution import Workers, default_workers


@pytest.mark.parametrize("processes", [0, -1, 1.5, True, "2"])
def test_a_bad_number_of_processes(processes: Any) -> None:
    with pytest.raises(SpecError, match="processes must be a whole number >= 1, got"):
        Workers(processes=processes)


def test_closed_workers_say_so() -> None:
    workers = Workers()
    workers.close()
    with pytest.raises(ClosedError, match="these workers must be open"):
        _ = workers.executors


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
        "spec = {'fn': lambda d, lp: time.sleep(60), 'weight': 1, 'name': 's',\n"
        "        'run_in': 'thread', 'timeout': 0.1, 'on_error': 'skip'}\n"
        "out = compute([], [torch.ones(1)], lambda d, lp: lp[0].sum(), regularizers=[spec])\n"
        "print(out.skipped['s'][:16])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "TermTimeoutError\n"
