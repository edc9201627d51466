from __future__ import annotations

import multiprocessing.spawn
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from steelyard.execution import process_lifecycle

SCRIPT = """
import torch
from steelyard import Pipeline, RegularizerSpec, Workers
print("imported once")
factor = 2.0
def helper(x):
    return factor * x.sum()
def term(data, logprobs):
    return helper(logprobs[0])
specs = [RegularizerSpec(term, 1.0, "f", run_in="process"),
         RegularizerSpec(lambda d, lp: lp[0].sum(), 1.0, "l", run_in="process")]
output = Pipeline(
    lambda d, lp: lp[0].sum(), specs, workers=Workers(processes=1)
).compute([], [torch.ones(3)])
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
        timeout=600,
        check=True,
    )
    assert done.stdout == "imported once\n12.0 [4.0, 4.0, 4.0]\n"
    assert done.stderr == ""


UNCHANGED = """
import multiprocessing.spawn
before = multiprocessing.spawn.get_preparation_data
import torch
from steelyard import Pipeline, RegularizerSpec, Workers
print(multiprocessing.spawn.get_preparation_data is before)
term = RegularizerSpec(lambda d, lp: lp[0].sum(), 1.0, "t", run_in="process")
with Workers(processes=1) as workers:
    Pipeline(lambda d, lp: lp[0].sum(), [term], workers=workers).compute([], [torch.ones(3)])
print(multiprocessing.spawn.get_preparation_data is before)
"""


AT_EXIT = """
import atexit, torch
import pebble.pool.process
atexit.register(print, "pebble ends")
from steelyard import Pipeline, RegularizerSpec, Workers
from steelyard.execution.processes import ProcessExecutor
close = ProcessExecutor.close
ProcessExecutor.close = lambda self: print("closed") or close(self)
term = RegularizerSpec(lambda d, lp: lp[0].sum(), 1.0, "t", run_in="process")
Pipeline(
    lambda d, lp: lp[0].sum(), [term], workers=Workers(processes=1)
).compute([], [torch.ones(3)])
"""


def test_workers_that_nobody_refers_to_are_closed_before_pebble_kills_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.splitlines()[:2] == ["closed", "pebble ends"]
    assert done.stderr == ""


def test_neither_the_import_nor_a_worker_changes_multiprocessing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCHANGED], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout == "True\nTrue\n"


def test_a_process_of_another_thread_is_prepared_as_before_while_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("json.tool"))

    def prepared() -> bool:
        return "init_main_from_name" in multiprocessing.spawn.get_preparation_data("other")

    with process_lifecycle._without_main_script(), ThreadPoolExecutor(1) as thread:
        assert not prepared()
        assert thread.submit(prepared).result()
    assert prepared()


def test_other_processes_are_prepared_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("json.tool"))
    data = multiprocessing.spawn.get_preparation_data("other")
    assert data["init_main_from_name"] == "json.tool"


LOCKS = """
import time, torch
from multiprocessing import Lock
from steelyard import Pipeline, RegularizerSpec
def finished(data, logprobs):
    from tqdm import tqdm
    return sum(tqdm(logprobs, disable=None)).sum()
def hanging(data, logprobs):
    keep = Lock()
    time.sleep(600)
mine = Lock()
specs = [RegularizerSpec(finished, 1.0, "f", run_in="process"),
         RegularizerSpec(hanging, 1.0, "h", run_in="process", timeout=0.5, on_error="skip")]
print(*Pipeline(lambda d, lp: lp[0].sum(), specs).compute([], [torch.ones(3)]).skipped)
with mine:
    pass
"""


def test_a_killed_worker_leaves_no_semaphore(tmp_path: Path) -> None:
    """Python's resource tracker would warn of it when the program ends."""
    (tmp_path / "script.py").write_text(LOCKS)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("h\n", "")
