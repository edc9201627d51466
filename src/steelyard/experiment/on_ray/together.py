"""Several runs at once, each attended by a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeAlias

Stop: TypeAlias = Callable[[], bool]


def run_together(tasks: Sequence[Callable[[Stop], None]], at_once: int, stop: Stop) -> None:
    """Call each of the tasks in a thread, at most `at_once` at a time, and wait for all.

    A task gets a function that returns True when it should end: once `stop()` does, or once
    another task has failed. The error of the first one, in their order, is raised.
    """
    failed = threading.Event()

    def stopping() -> bool:
        return failed.is_set() or stop()

    def run(task: Callable[[Stop], None]) -> None:
        if stopping():
            return
        try:
            task(stopping)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max(1, at_once), "steelyard-run") as pool:
        futures = [pool.submit(run, task) for task in tasks]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C where nobody handles it
            failed.set()
            raise
    for future in futures:
        future.result()
