"""Helpers for tests that run in every lane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from steelyard.execution import Batch, Ticket, Workers

LANES: tuple[str, ...] = ("thread", "process", "async", "ray")


def for_lane(lane: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as the lane takes it; a sleep in it becomes one that yields."""
    if lane != "async":
        return fn

    async def afn(*args: Any) -> Any:
        return fn(*args)

    return afn


def ticket(lane: str, fn: Callable[..., Any], *args: Any, timeout: float | None = 300.0) -> Ticket:
    return Ticket(fn.__name__, lane, for_lane(lane, fn), args, timeout)


def run(workers: Workers, tickets: list[Ticket], width: int = 2, **options: Any) -> list[Ticket]:
    with Batch(tickets, workers.executors, width, **options) as batch:
        return list(batch.settled())


def double(x: int) -> int:
    return 2 * x


def hang(lane: str) -> Callable[[], Any]:
    if lane != "async":
        return lambda: time.sleep(60.0)

    async def nap() -> None:
        await asyncio.sleep(60.0)

    return nap
