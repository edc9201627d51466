"""Kill writers of checkpoints, let writers race, flip bits: what loads must be what was saved."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.progress import track

from benchmarks.measure import CONSOLE
from steelyard.engine.checkpoint_contents import CheckpointContents
from steelyard.engine.checkpoints import Checkpoints
from steelyard.errors import CheckpointError

KILLS, OVERWRITES, FLIPS = 100, 300, 1000
SIZE = 50_000  # numbers in a tensor


def contents(number: int) -> CheckpointContents:
    """Contents in which every value is `number`."""
    tensor = torch.full((SIZE,), float(number))
    info = {"n": number, "base_model": "m", "lora": {}}
    return CheckpointContents(info, {"w": tensor}, {"m": tensor}, {"n": number})


def number_in(found: CheckpointContents) -> int:
    """The number that all values are; fails if they are not."""
    tensors = [*found.weights.values(), *(found.optimizer_state or {}).values()]
    number = int(found.info["n"])
    is_whole = len(tensors) == 2 and all(bool((tensor == number).all()) for tensor in tensors)
    if not is_whole or found.config != {"n": number}:
        sys.exit(f"a checkpoint of {number} is a mixture")
    return number


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a child process, and return its id; an exception becomes exit status 1."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - a child must not go on in the parent's code
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def kills(folder: Path) -> None:
    """Kill two writers of one name in the middle of their work; load all that is there."""
    checkpoints, rng = Checkpoints(folder), random.Random(0)
    parent = folder / "run" / "weights"

    def write_on(number: int, ready: int) -> None:
        for count in range(1_000_000):
            saved = contents(number)
            checkpoints.write("run", "weights", "latest", saved, overwrite=True)
            checkpoints.write("run", "weights", f"n{number}-{count}", saved, overwrite=False)
            os.write(ready, b"!")

    loaded = 0
    for number in track(range(0, KILLS, 2), description="kills while saving", console=CONSOLE):
        readable, ready = os.pipe()
        writers = [fork(partial(write_on, n, ready)) for n in (number, number + 1)]
        os.read(readable, 1)
        time.sleep(rng.uniform(0, 0.05))
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        os.close(ready)
        os.close(readable)
        for entry in checkpoints.entries("run"):
            found = number_in(checkpoints.read(entry.path))
            if entry.name != "latest" and not entry.name.startswith(f"n{found}-"):
                sys.exit(f"{entry.name} holds what was saved as n{found}")
            loaded += 1
    names = [entry.name for entry in parent.iterdir()]
    visible = len([name for name in names if not name.startswith(".")])
    listed = len(checkpoints.entries("run"))
    hidden = len(names) - visible
    for file in parent.iterdir():
        os.utime(file, (0, 0), follow_symlinks=False)
    checkpoints.write("run", "weights", "latest", contents(0), overwrite=True)
    left = len(list(parent.iterdir())) - 2 * visible
    CONSOLE.print(
        f"{KILLS} kills while saving: {visible} checkpoints, all whole, loaded {loaded} times; "
        f"{hidden - visible} unfinished folders and links, {left} after a sweep"
    )
    if listed != visible or left:
        sys.exit("a checkpoint is damaged, or something is left")


def race(folder: Path) -> None:
    """Let two processes overwrite one name while others read it and set its expiry."""
    checkpoints = Checkpoints(folder)
    path = checkpoints.write("run", "weights", "a", contents(0), overwrite=False)

    def write(first: int) -> None:
        for number in range(first, first + OVERWRITES):
            checkpoints.write("run", "weights", "a", contents(number), overwrite=True)

    def read() -> None:
        for _ in range(OVERWRITES):
            number_in(checkpoints.read(path))

    def expire() -> None:
        for count in range(OVERWRITES):
            checkpoints.set_expiry(path, time.time() + 1000 + count)

    began = time.perf_counter()
    work = [lambda: write(0), lambda: write(OVERWRITES), read, expire]
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in [fork(each) for each in work])
    number_in(checkpoints.read(path))
    left = len(list((folder / "run" / "weights").iterdir())) - 2
    CONSOLE.print(
        f"2 writers x {OVERWRITES} of one name, a reader, changes of its expiry: {failed} failed, "
        f"{left} folders left, {time.perf_counter() - began:.0f} s"
    )
    if failed or left:
        sys.exit("a process failed, or a folder is left")


def flips(folder: Path) -> None:
    """Flip one bit anywhere in a checkpoint: it is refused, or its values are unchanged."""
    checkpoints, rng = Checkpoints(folder), random.Random(0)
    path = checkpoints.write("run", "weights", "a", contents(7), overwrite=False)
    saved = checkpoints.read(path)
    files = sorted((folder / "run" / "weights" / "a").iterdir())
    refused = 0
    for _ in track(range(FLIPS), description="flipped bits", console=CONSOLE):
        file = rng.choice(files)
        original = file.read_bytes()
        content = bytearray(original)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        try:
            found = checkpoints.read(path)
        except CheckpointError as error:
            refused += 1
            if file.name not in str(error):
                sys.exit(f"{file.name} is not named: {error}")
        else:
            if number_in(found) != 7 or found.info != saved.info:
                sys.exit(f"a flipped bit in {file.name} went unnoticed")
        file.write_bytes(original)
    CONSOLE.print(f"{FLIPS} flipped bits in {len(files)} files: {refused} refused, 0 unnoticed")


def main() -> None:
    torch.set_num_threads(1)  # forked children must not wait for threads that they do not have
    for check in (kills, race, flips):
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))


if __name__ == "__main__":
    main()
