"""`Watcher`: receives the progress of a run, for example to display it."""

from __future__ import annotations

from typing import Any, Protocol


class Watcher(Protocol):
    """Receives the progress of a run, for example to display it."""

    def say(self, text: str) -> None:
        """Receive a message, such as a warning or that the model is being loaded."""

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Receive the metrics of a completed step: its line of `metrics.jsonl`.

        Args:
            step: number of the step, from 0.
            steps: number of steps of the run.
            metrics: flat metrics.
        """


class SilentWatcher:
    """Watcher that ignores everything."""

    def say(self, text: str) -> None:
        """Ignore a message."""

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Ignore a step."""
