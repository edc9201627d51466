"""`FailureLog`: writes where the user's own terms and rewards failed, with the traceback."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Self

from steelyard import telemetry
from steelyard.experiment.run_dir import RunFolder
from steelyard.spec import raised_at, title


class FailureLog:
    """Log the failures of a run's terms that do not end it: skipped terms, held-out values.

    Each place in the user's code is reported once. Use it as a context manager around the steps of
    the run: a handler of telemetry gets the exceptions.

    Args:
        run: run folder, whose `log.txt` gets the traceback.
        say: gets a sentence with the file and the line.

    Attributes:
        last: the failure that was logged last.
    """

    def __init__(self, run: RunFolder, say: Callable[[str], None]) -> None:
        self.last: BaseException | None = None
        self._run = run
        self._say = say
        self._seen: set[tuple[str, str]] = set()
        self._handler = f"steelyard.failure_log.{uuid.uuid4()}"

    def __enter__(self) -> Self:
        telemetry.attach(self._handler, telemetry.events.TERM_EXCEPTION, self._term_failed)
        return self

    def __exit__(self, *_: object) -> None:
        telemetry.detach(self._handler)

    def _term_failed(self, _: str, __: object, metadata: Mapping[str, Any], ___: object) -> None:
        self.record(title(metadata["regularizer_name"]), metadata["reason"])

    def record(self, who: str, error: BaseException) -> None:
        """Log a failure, if the user's own code raised it, and not at this place before."""
        place = raised_at(error.__cause__ or error)
        if not place or (who, place) in self._seen:
            return
        self._seen.add((who, place))
        self.last = error
        self._say(
            f"{who} failed at {place}; the whole traceback is in {self._run.path / 'log.txt'}"
        )
        self._run.log("".join(traceback.format_exception(error)))
