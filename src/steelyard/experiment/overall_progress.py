"""Progress over several runs, for a watcher that shows one progress bar."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.experiment.watcher import Watcher


@dataclass
class OverallProgress:
    """Passes the steps of several runs to one watcher, counted over all runs.

    Runs may be in several threads; the watcher is notified by one at a time.

    Attributes:
        watch: the watcher that is notified.
        steps: number of steps of all runs together.
        done: number of steps that each run has made, by the run's name; begin with those of the
            runs that have finished before.
    """

    watch: Watcher
    steps: int
    done: dict[str, int] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def say(self, text: str) -> None:
        """Pass a message to the watcher."""
        with self._lock:
            self.watch.say(text)

    def of(self, run: str, after: int = 0) -> Watcher:
        """Watcher of one run, or of a part of it that follows `after` steps."""
        return _RunProgress(self, run, after)


@dataclass(frozen=True)
class _RunProgress:
    overall: OverallProgress
    run: str
    after: int

    def say(self, text: str) -> None:
        self.overall.say(text)

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:  # noqa: ARG002 - of one run
        overall = self.overall
        with overall._lock:  # noqa: SLF001 - of this module
            overall.done[self.run] = self.after + step + 1
            overall.watch.step(sum(overall.done.values()) - 1, overall.steps, metrics)


@dataclass
class NewSteps:
    """Reports the steps that another process adds to a metrics file.

    Attributes:
        file: the file, `metrics.jsonl` of a run.
        steps: number of steps of the run.
        watch: the watcher that is notified.
        reported: number of lines that it was notified of.
    """

    file: Path
    steps: int
    watch: Watcher
    reported: int = 0

    def report(self) -> None:
        """Notify the watcher of the lines that were added."""
        # What follows the last newline may be half a line, still being written.
        lines = self.file.read_bytes().split(b"\n")[:-1] if self.file.exists() else []
        for line in lines[self.reported :]:
            metrics = json.loads(line)
            self.watch.step(metrics["step"], self.steps, metrics)
        self.reported = len(lines)
