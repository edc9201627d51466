"""Progress, findings and failures of runs.

`Watcher` receives them, `OverallProgress` counts the steps of several runs, and `RunLog` writes
messages, findings and tracebacks of one run.
"""

from __future__ import annotations

import json
import threading
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from steelyard import telemetry
from steelyard.doctor.finding import Finding
from steelyard.experiment.run.folder import RunFolder
from steelyard.output.redaction import redact
from steelyard.spec.error_messages import raised_at, title


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


@runtime_checkable
class FindingsWatcher(Watcher, Protocol):
    """A watcher that shows the doctor's findings itself; others get their lines by `say`."""

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:
        """Receive the doctor's findings, before each step.

        Args:
            changed: those that begin or end with the step.
            lasting: all that last after it, with its numbers.
        """


def pass_findings(watch: Watcher, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:
    """Pass findings to a watcher, or their lines to one without `findings`."""
    if isinstance(watch, FindingsWatcher):
        watch.findings(changed, lasting)
        return
    for finding in changed:
        watch.say(redact(finding.line))


@runtime_checkable
class RunsWatcher(Watcher, Protocol):
    """A watcher that tells runs apart; others get the steps counted over all runs."""

    def step_of(self, run: str, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Receive the metrics of a completed step of one of several runs, counted in that run."""


class SilentWatcher:
    """Watcher that ignores everything."""

    def say(self, text: str) -> None:
        """Ignore a message."""

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Ignore a step."""


@dataclass
class OverallProgress:
    """Passes the steps of several runs to one watcher, counted over all runs.

    A `RunsWatcher` gets them as they are counted in each run, with the name of the run. Runs may
    be in several threads; the watcher is notified by one at a time.

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

    def of(self, run: str, name: str | None = None, after: int = 0) -> Watcher:
        """Watcher of one run, or of a part of it with a name of its own, after so many steps."""
        return _RunProgress(self, run, name or run, after)


@dataclass(frozen=True)
class _RunProgress:
    overall: OverallProgress
    run: str
    name: str
    after: int

    def say(self, text: str) -> None:
        self.overall.say(text)

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        overall, watch = self.overall, self.overall.watch
        with overall._lock:  # noqa: SLF001 - of this module
            overall.done[self.run] = self.after + step + 1
            if isinstance(watch, RunsWatcher):
                watch.step_of(self.name, step, steps, metrics)
            else:
                watch.step(sum(overall.done.values()) - 1, overall.steps, metrics)

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:  # noqa: ARG002 - of one run
        for finding in changed:
            self.say(f"{self.name}: {finding.line}")


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


class RunLog:
    """Messages and findings of a run, and the failures of its terms that do not end it.

    Args:
        run: run folder, whose `log.txt` gets messages and tracebacks.
        watch: notified of the messages.

    Attributes:
        last_failure: the failure that was logged last.
    """

    def __init__(self, run: RunFolder, watch: Watcher) -> None:
        self.last_failure: BaseException | None = None
        self._run, self._watch = run, watch
        self._seen: set[tuple[str, str]] = set()

    def say(self, text: str) -> None:
        """Log a message, and pass it to the watcher."""
        self._run.log(text)
        self._watch.say(redact(text))

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:
        """Log the findings that begin or end, and pass them and those that last to the watcher."""
        for finding in changed:
            self._run.log(finding.line)
        pass_findings(self._watch, changed, lasting)

    @contextmanager
    def record_terms(self) -> Iterator[None]:
        """Record the failures of all terms that are evaluated in the block."""
        handler = f"steelyard.run_log.{uuid.uuid4()}"
        telemetry.attach(handler, telemetry.events.TERM_EXCEPTION, self._term_failed)
        try:
            yield
        finally:
            telemetry.detach(handler)

    def _term_failed(self, _: str, __: object, metadata: Mapping[str, Any], ___: object) -> None:
        self.record(title(metadata["regularizer_name"]), metadata["reason"])

    def record(self, who: str, error: BaseException) -> None:
        """Log a failure, if the user's own code raised it, and not at this place before."""
        place = raised_at(error.__cause__ or error)
        if not place or (who, place) in self._seen:
            return
        self._seen.add((who, place))
        self.last_failure = error
        self.say(f"{who} failed at {place}; the whole traceback is in {self._run.path / 'log.txt'}")
        self._run.log("".join(traceback.format_exception(error)))
