"""Checkpoints of processes that are killed while they write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

# A process of its own: children are forked from it, so it may have no thread but the first. The
# engine's thread would be one; what it writes is written here without it. Each child is killed
# before another one of its operations on files, until one has had its last: Python reports all but
# `fsync` to audit hooks. `make stress` kills a hundred at random moments.
SCRIPT = """
import itertools, json, os, signal, sys
from dataclasses import replace
from pathlib import Path
import torch
from steelyard.engine.model_sources import find_model
from steelyard.engine.adapter import LoraSettings
from steelyard.engine.checkpoint_contents import TrainingState
from steelyard.engine.checkpoints import Checkpoints
from steelyard.engine.memory import TokenBudget
from steelyard.engine.model import Model
from tinker import types

torch.set_num_threads(1)
model = Model(find_model("tiny-random"), torch.device("cpu"), torch.float32)
adapter = model.add_adapter(LoraSettings(rank=4, seed=0))
adapter.step(types.AdamParams())
state = TrainingState(model, adapter, TokenBudget(model, None), "run", {})
checkpoints = Checkpoints(Path(sys.argv[1]))
folder = Path(sys.argv[1]) / "run" / "weights"

def contents(number):
    "Contents in which every number is `number`."
    made = state.capture({**state.describe(None, None), "number": number}, optimizer=True)
    filled = [{k: torch.full_like(v, number) for k, v in part.items()}
              for part in (made.weights, made.optimizer_state)]
    return replace(made, weights=filled[0], optimizer_state=filled[1])

def check(name):
    "Check that a checkpoint is whole, and return its number."
    found = checkpoints.read(f"tinker://run/weights/{name}")
    state.restore(found, name, optimizer=True)
    number = found.info["number"]
    for tensor in [*found.weights.values(), *found.optimizer_state.values()]:
        assert bool((tensor == number).all()), (name, number)
    return number

def write(name, number, overwrite):
    checkpoints.write("run", "weights", name, contents(number), overwrite=overwrite)

def killed(at, name, overwrite):
    "Write in a child that is killed before its operation `at` on files; False if it has fewer."
    child = os.fork()
    if child == 0:
        operations = itertools.count(1)
        def count(event, _):
            is_of_files = event == "open" or event.startswith(("os.", "shutil.", "fcntl."))
            if is_of_files and next(operations) == at:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        write(name, at, overwrite)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0

seen = {"old": 0, "new": 0, "none": 0}
write("latest", 0, True)
for overwrite in (True, False):
    last = 0
    for at in itertools.count(1):
        name = "latest" if overwrite else f"n{at}"
        goes_on = killed(at, name, overwrite)
        if (folder / name).is_symlink():
            number = check(name)
            assert number == at or (overwrite and number == last), (name, number)
            seen["new" if number == at else "old"] += goes_on
            last = number
        else:
            assert not overwrite
            seen["none"] += goes_on
        if not goes_on:
            assert check(name) == at
            break
for link in folder.iterdir():
    if not link.name.startswith("."):
        check(link.name)
print(json.dumps(seen))
"""


def test_every_checkpoint_loads_after_its_writer_was_killed_at_any_moment(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    # Children were killed before and after each moment at which a checkpoint appears.
    assert min(json.loads(done.stdout).values()) > 0, done.stdout
