"""Server-sent events: the list of runs when it changes, and the new rows of some runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from steelyard.errors import RunError
from steelyard.experiment.secrets import redact
from steelyard.experiment.step_metrics import short_reason, skipped_terms
from steelyard.experiment.watch.run_index import METRICS
from steelyard.experiment.watch.run_view import RunViews
from steelyard.experiment.watch.series import Position, numbers, rows_after

_POLL_SECONDS = 0.5
_TICKS_OF_SILENCE = 30  # after which a comment is sent, so that a proxy keeps the connection
_MAX_BYTES = 2**21  # of the metrics of a run in one event


@dataclass
class Followed:
    """A run whose new rows are sent, and up to where the page has its metrics."""

    name: str
    position: Position


async def events(
    views: RunViews, followed: Sequence[Followed], stopping: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yield events until `stopping` is set.

    `runs` is the list, at the beginning and whenever it changes; `rows` has new rows of a run
    and the terms skipped there; `reset` says that a run must be loaded again, since rows that were
    sent were replaced.
    """
    last_list = b""
    ticks = 0
    following = list(followed)
    yield b"retry: 2000\n\n"
    while not stopping.is_set():
        listed = _event("runs", await run_in_threadpool(list_runs, views))
        found = await run_in_threadpool(_news, views, following)
        if listed != last_list:
            found = [listed, *found]
            last_list = listed
        for event in found:
            yield event
        ticks = 0 if found else ticks + 1
        if ticks and ticks % _TICKS_OF_SILENCE == 0:
            yield b": nothing new\n\n"
        try:
            await asyncio.wait_for(stopping.wait(), _POLL_SECONDS)
        except TimeoutError:
            continue


def list_runs(views: RunViews) -> dict[str, Any]:
    """List of the runs as JSON."""
    return {
        "folder": str(views.index.folder),
        "runs": [asdict(run) for run in views.index.list()],
    }


def _news(views: RunViews, following: list[Followed]) -> list[bytes]:
    found = []
    for run in list(following):
        try:
            path = views.index.path(run.name) / METRICS
        except RunError:  # removed: the list says so
            following.remove(run)
            continue
        added = rows_after(path, run.position, _MAX_BYTES)
        if added is None:
            found.append(_event("reset", {"run": run.name}))
            following.remove(run)
            continue
        rows, run.position = added
        if rows:
            data = {"run": run.name, "position": str(run.position)}
            shown = {"rows": [numbers(row) for row in rows], "skipped": _skipped(rows)}
            found.append(_event("rows", data | shown))
    return found


def _skipped(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"term": term, "reason": short_reason(redact(reason)), "step": row["step"]}
        for row in rows
        for term, reason in skipped_terms(row).items()
    ]


def _event(kind: str, data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()
