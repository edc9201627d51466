"""Send problems as alerts to Weights & Biases and to Trackio, in runs that are open there."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from steelyard.doctor.finding import Finding
from steelyard.output.redaction import redact

_log = logging.getLogger(__name__)

_TRACKERS = ("wandb", "trackio")
_MAX_TITLE = 63  # of W&B


def alert(findings: Iterable[Finding]) -> None:
    """Send the problems that begin as alerts to the trackers in which this process has a run.

    Nothing is imported, and an alert that fails is logged and stops nobody.
    """
    problems = [f for f in findings if f.severity == "problem" and f.ended is None]
    for name in _TRACKERS:
        tracker = sys.modules.get(name)
        if tracker is not None and problems and _has_run(tracker):
            for problem in problems:
                _send(tracker, problem)


def _send(tracker: Any, problem: Finding) -> None:
    title = f"{problem.rule}: {problem.subject}"[:_MAX_TITLE]
    try:
        # Both have alert, and levels of these names.
        level = tracker.AlertLevel["ERROR"]
        tracker.alert(
            title=title, text=redact(f"{problem.text} (step {problem.step})"), level=level
        )
    except Exception:  # noqa: BLE001 - whatever the tracker or its connection makes of it
        _log.warning("the alert %r could not be sent", title, exc_info=True)


def _has_run(tracker: Any) -> bool:
    if tracker.__name__ == "wandb":
        # A folder of this name that W&B has written is a package without anything, if imported.
        return getattr(tracker, "run", None) is not None
    # Each thread has its own; versions before alerts have no AlertLevel.
    return hasattr(tracker, "AlertLevel") and tracker.context_vars.current_run.get() is not None
