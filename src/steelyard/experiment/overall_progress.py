"""Progress over several runs, for a watcher that shows one progress bar."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steelyard.experiment.watcher import Watcher


@dataclass
class OverallProgress:
    """Passes the steps of several runs to one watcher, counted over all runs.

    Attributes:
        watch: the watcher that is notified.
        steps: number of steps of all runs together.
        done: number of steps that each run has made, by the run's name; begin with those of the
            runs that have finished before.
    """

    watch: Watcher
    steps: int
    done: dict[str, int] = field(default_factory=dict)

    def of(self, run: str, after: int = 0) -> Watcher:
        """Watcher of one run, or of a part of it that follows `after` steps."""
        return _RunProgress(self, run, after)


@dataclass(frozen=True)
class _RunProgress:
    overall: OverallProgress
    run: str
    after: int

    def say(self, text: str) -> None:
        self.overall.watch.say(text)

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:  # noqa: ARG002 - of one run
        overall = self.overall
        overall.done[self.run] = self.after + step + 1
        overall.watch.step(sum(overall.done.values()) - 1, overall.steps, metrics)
