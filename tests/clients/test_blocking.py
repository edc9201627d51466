"""One body for plain code and for coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from steelyard.clients.blocking import Action, Steps, run, run_async


def waited(steps: Steps[Any]) -> Any:
    return asyncio.run(run_async(steps))


def body(log: list[str]) -> Steps[str]:
    async def wait() -> str:
        return "awaited"

    first = yield Action(lambda: "blocked", wait)
    thread = yield Action(threading.current_thread)
    log += [first, "here" if thread is threading.main_thread() else "in a thread"]
    try:
        yield Action(lambda: 1 // 0)
    except ZeroDivisionError as error:
        log.append(str(error))
    return "returned"


@pytest.mark.parametrize(
    ("runs", "expected"),
    [(run, ["blocked", "here"]), (waited, ["awaited", "in a thread"])],
)
def test_steps_get_the_results_and_the_errors_of_their_actions(
    runs: Callable[[Steps[str]], str], expected: list[str]
) -> None:
    log: list[str] = []
    assert runs(body(log)) == "returned"
    assert log == [*expected, "integer division or modulo by zero"]


def test_a_cancelled_coroutine_cancels_its_steps() -> None:
    log: list[str] = []

    def cancelled() -> Steps[None]:
        try:
            yield Action(lambda: None, lambda: asyncio.get_running_loop().create_future())
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    async def main() -> None:
        task = asyncio.ensure_future(run_async(cancelled()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert log == ["cancelled"]
