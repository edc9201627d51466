from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment import RunFolder
from steelyard.experiment.page import app as page_app
from steelyard.experiment.page import run_views
from steelyard.experiment.page.app import Followed, events
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.page.run_views import RunViews
from steelyard.experiment.page.series import Position

from .conftest import STEPS

Next = Callable[[], Awaitable[tuple[str, Any]]]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_app, "_POLL_SECONDS", 0.01)


def follow(
    folder: Path,
    run: str | None,
    use: Callable[[Next], Awaitable[None]],
    *,
    position: Position | None = None,
) -> None:
    """Call `use` with a function that waits for the next event, from what a view has."""
    views = RunViews(RunIndex(folder))
    following = []
    if run is not None:
        shown = Position.parse(views.view(run, smoothing=0.0)["position"])
        following = [Followed(run, position or shown)]

    async def main() -> None:
        stopping = asyncio.Event()
        stream = events(views, following, stopping)
        assert await anext(stream) == b"retry: 2000\n\n"
        await use(lambda: parsed(stream))
        stopping.set()
        assert [event async for event in stream if not event.startswith(b":")] == []

    asyncio.run(main())


async def parsed(stream: AsyncIterator[bytes]) -> tuple[str, Any]:
    event = await anext(stream)
    kind, data, _, _ = event.decode().split("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_the_list_is_sent_at_first_and_when_it_changes(runs: Path) -> None:
    async def use(receive: Next) -> None:
        kind, data = await receive()
        assert (kind, [run["name"] for run in data["runs"]]) == ("runs", ["first"])
        assert data["folder"] == str(runs)
        (runs / "second").mkdir()
        (runs / "second" / "config.json").write_text("{}")
        _, data = await receive()
        assert {run["name"] for run in data["runs"]} == {"first", "second"}

    follow(runs, None, use)


def test_new_rows_are_sent_once(runs: Path) -> None:
    run = RunFolder(runs / "first")

    async def use(receive: Next) -> None:
        await receive()
        run.append({"step": STEPS, "loss_total": float("nan"), "text": "x"})
        found = dict([await receive(), await receive()])
        whole = run.metrics_file.read_bytes()
        last = whole.splitlines(keepends=True)[-1]
        assert found["rows"] == {
            "run": "first",
            "position": str(Position.after(last, len(whole))),
            "rows": [{"step": STEPS, "loss_total": None}],
            "skipped": [],
        }
        run.append({"step": STEPS + 1, "skipped/judge": 1.0, "skipped/judge/reason": "OSError: x"})
        found = dict([await receive(), await receive()])
        assert [row["step"] for row in found["rows"]["rows"]] == [STEPS + 1]
        skipped = {"term": "judge", "reason": "OSError: x", "step": STEPS + 1}
        assert found["rows"]["skipped"] == [skipped]

    follow(runs, "first", use)


def test_a_page_that_lost_its_connection_gets_what_it_lacks(runs: Path) -> None:
    async def use(receive: Next) -> None:
        found = dict([await receive(), await receive()])
        assert [row["step"] for row in found["rows"]["rows"]] == list(range(STEPS))

    follow(runs, "first", use, position=Position.after(b"", 0))


def test_a_run_that_was_cut_must_be_loaded_again(runs: Path) -> None:
    run = RunFolder(runs / "first")

    async def use(receive: Next) -> None:
        await receive()
        run.cut(len(run.metrics_file.read_bytes().splitlines(keepends=True)[0]))
        found = dict([await receive(), await receive()])
        assert found["reset"] == {"run": "first"}

    follow(runs, "first", use)


def test_a_run_before_its_first_step_is_not_loaded_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    async def use(receive: Next) -> None:
        assert (await receive())[0] == "runs"
        (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss_total": 1.0}\n')
        kinds = {(await receive())[0], (await receive())[0]}
        assert kinds == {"runs", "rows"}, "no reset while there are no metrics yet"

    follow(tmp_path, ".", use)


def test_more_runs_are_followed_than_are_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_views, "_MAX_RUNS", 1)
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 0, "loss_total": 1.0}\n')
    views = RunViews(RunIndex(tmp_path))
    following = [
        Followed(name, Position.parse(views.view(name, smoothing=0.0)["position"])) for name in "ab"
    ]
    assert page_app._news(views, following) == []


def test_a_run_that_is_removed_ends_nothing(runs: Path) -> None:
    async def use(receive: Next) -> None:
        await receive()
        (runs / "first").rename(runs.parent / "elsewhere")
        _, data = await receive()
        while data["runs"]:
            _, data = await receive()

    follow(runs, "first", use)
