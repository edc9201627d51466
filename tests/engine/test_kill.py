"""Checkpoints of processes that are killed while they write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = 24  # `make stress` kills a hundred

# A process of its own: children are forked from it, so it may have no thread but the first. An
# engine starts its thread with its first call, which is made in the child.
SCRIPT = """
import json, os, random, signal, sys, time
import torch
from tinker import types
from steelyard.engine import LocalServiceClient

torch.set_num_threads(1)
kills, root = int(sys.argv[1]), sys.argv[2]
service = LocalServiceClient(checkpoint_dir=root, device="cpu", max_tokens=64)
service._worker("tiny-random")
datum = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]}
)
generator = random.Random(0)

def save(ready, number):
    training = service.create_lora_training_client("tiny-random", rank=4, seed=number)
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams()).result()
    for count in range(1_000_000):
        training.save_state("latest", overwrite=True).result()
        training.save_state(f"n{number}-{count}").result()
        os.write(ready, b"!")

def checked(run):
    found = 0
    folder = os.path.join(root, run, "weights")
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if not name.startswith("."):
            checkpoint = service.checkpoints.read(f"tinker://{run}/weights/{name}")
            assert checkpoint.optimizer_state and checkpoint.weights.keys(), name
            found += 1
    left = len([name for name in os.listdir(folder) if name.startswith(".")]) - found
    return found, left

run = f"{service.session_id}:train:0"
number = left = 0
while number < kills or (left == 0 and number < 10 * kills):  # until one was killed mid-save
    number += 1
    readable, ready = os.pipe()
    child = os.fork()
    if child == 0:
        save(ready, number)
    os.close(ready)
    os.read(readable, 1)
    os.close(readable)
    time.sleep(generator.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found, left = checked(run)

training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
training.load_state_with_optimizer(f"tinker://{run}/weights/latest").result()
print(json.dumps({"found": found, "left": left}))
"""


def test_every_checkpoint_loads_after_its_writer_was_killed_at_any_moment(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(KILLS), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["found"] > KILLS
    assert seen["left"] > 0, "none was killed in the middle of a save"
