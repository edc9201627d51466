"""Rewards that tests send to threads, processes and the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any


def words(record: Mapping[str, Any], answer: str, scale: float = 1.0) -> float:
    return scale * len(answer.split())


async def awords(record: Mapping[str, Any], answer: str, scale: float = 1.0) -> float:
    await asyncio.sleep(0)
    return scale * len(answer.split())


def lazily(record: Mapping[str, Any], answer: str, scale: float = 1.0) -> Any:
    """A plain function that returns a coroutine."""
    return awords(record, answer, scale)


def hang_on_bad(record: Mapping[str, Any], answer: str) -> float:
    if answer == "bad":
        threading.Event().wait()
    return 1.0


async def ahang_on_bad(record: Mapping[str, Any], answer: str) -> float:
    if answer == "bad":
        await asyncio.Event().wait()
    return 1.0


def die_on_bad(record: Mapping[str, Any], answer: str) -> float:
    if answer == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def fail_on_bad(record: Mapping[str, Any], answer: str) -> float:
    if answer == "bad":
        raise ValueError("no such place")
    return 1.0


class Scaled:
    """A reward with an option, as a config builds it."""

    name = "scaled"

    def __init__(self, by: float = 2.0) -> None:
        self.by = by

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        return self.by * len(answer)


def fork(record: Mapping[str, Any], answer: str) -> float:
    """Count the words in a child process, as a library may do."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(len(answer.split())).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return float(pipe.read())
