"""Helpers for tests that run in every executor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.workers import Workers

EXECUTORS: tuple[str, ...] = ("thread", "process", "async", "ray")


def as_taken(executor: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as the executor takes it; a sleep in it becomes one that yields."""
    if executor != "async":
        return fn

    async def afn(*args: Any) -> Any:
        return fn(*args)

    return afn


def ticket(
    executor: str, fn: Callable[..., Any], *args: Any, timeout: float | None = 300.0
) -> Ticket:
    return Ticket(fn.__name__, executor, as_taken(executor, fn), args, timeout)


def run(workers: Workers, tickets: list[Ticket], width: int = 2, **options: Any) -> list[Ticket]:
    with Batch(tickets, workers.executors, width, **options) as batch:
        return list(batch.settled())


def double(x: int) -> int:
    return 2 * x


def hang(executor: str) -> Callable[[], Any]:
    if executor != "async":
        return lambda: time.sleep(60.0)

    async def nap() -> None:
        await asyncio.sleep(60.0)

    return nap
