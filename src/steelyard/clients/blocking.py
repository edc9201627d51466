"""One body for plain code and for coroutines: a generator of the actions that may block."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Action:
    """An action that may block.

    Attributes:
        block: makes it in plain code.
        wait: makes it in a coroutine; None runs `block` in a thread.
    """

    block: Callable[[], Any]
    wait: Callable[[], Awaitable[Any]] | None = None


# It yields actions, is sent their results, and returns its own.
Steps: TypeAlias = Generator[Action, Any, T]


def run(steps: Steps[T]) -> T:
    """Make the actions of `steps` one after the other; returns what `steps` returns."""
    try:
        action = next(steps)
        while True:
            try:
                result = action.block()
            except BaseException as error:  # noqa: BLE001 - the steps see it, as if it were theirs
                action = steps.throw(error)
            else:
                action = steps.send(result)
    except StopIteration as stop:
        returned: T = stop.value
        return returned


async def run_async(steps: Steps[T]) -> T:
    """Do the same as `run`, without blocking the event loop."""
    try:
        action = next(steps)
        while True:
            try:
                result = await (action.wait() if action.wait else asyncio.to_thread(action.block))
            except BaseException as error:  # noqa: BLE001 - also a cancellation
                action = steps.throw(error)
            else:
                action = steps.send(result)
    except StopIteration as stop:
        returned: T = stop.value
        return returned
