"""Several runs at once, each in a process of its own, as many as memory allows."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from steelyard.errors import RunError
from steelyard.experiment.config import Config
from steelyard.experiment.run_dir import RunFolder
from steelyard.experiment.training_loop import Watcher

_SPARE = 1.25  # of what the largest run takes, before another is begun
_PAUSE = 0.2
_INTERRUPTED = 130


@dataclass
class _Child:
    folder: Path
    steps: int
    process: subprocess.Popen[bytes]
    told: int = field(default=0)

    @property
    def memory(self) -> int:
        """Bytes it takes; 0 when it has ended."""
        try:
            taken: int = psutil.Process(self.process.pid).memory_info().rss
        except psutil.Error:
            return 0
        return taken

    def tell(self, watch: Watcher) -> None:
        lines = RunFolder(self.folder).metrics_file
        found = lines.read_bytes().split(b"\n")[:-1] if lines.exists() else []
        for line in found[self.told :]:
            metrics = json.loads(line)
            watch.step(metrics["step"], self.steps, metrics)
        self.told = len(found)


def run_together(
    todo: Mapping[Path, Config], jobs: int, watch: Watcher, stop: Callable[[], bool]
) -> None:
    """Make runs, or go on with them, `jobs` at a time.

    Another one is begun when those under way have made a step, so that it is known how much
    memory a run takes, and there is room for one more.

    Raises:
        RunError: a run failed; the others are asked to save and end.
    """
    waiting = list(todo.items())
    running: list[_Child] = []
    failed: list[Path] = []
    asked = False
    while running or (waiting and not asked and not failed):
        if (stop() or failed) and not asked:
            asked = True
            for child in running:
                child.process.send_signal(signal.SIGINT)
        if waiting and not asked and len(running) < jobs and _room(running):
            folder, config = waiting.pop(0)
            watch.say(f"run {folder.name}")
            running.append(_start(folder, config))
        for child in list(running):
            child.tell(watch)
            code = child.process.poll()
            if code is not None:
                child.tell(watch)
                running.remove(child)
                if code not in (0, _INTERRUPTED):
                    failed.append(child.folder)
        time.sleep(_PAUSE)
    if failed:
        raise RunError(
            f"every run must end well, and {failed[0].name} did not: see "
            f"{failed[0] / 'log.txt'} and {_output(failed[0])}."
        )


def _start(folder: Path, config: Config) -> _Child:
    run = RunFolder(folder)
    if not run.holds_run:
        with run.locked():
            run.begin(config)
    command = [sys.executable, "-m", "steelyard", "resume", str(folder)]
    with _output(folder).open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own words
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is passed on, once, from here
        )
    return _Child(folder, config.train.steps, process)


def _room(running: list[_Child]) -> bool:
    if not running:
        return True
    if not all(child.told for child in running):
        return False
    largest = max(child.memory for child in running)
    return bool(psutil.virtual_memory().available > _SPARE * largest)


def _output(folder: Path) -> Path:
    return folder / "output.txt"
