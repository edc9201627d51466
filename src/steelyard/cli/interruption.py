"""Ctrl-C: the first one asks, the second one ends."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Self

INTERRUPTED = 130


class Interruption:
    """Inside it Ctrl-C only makes `asked()` true; a second one ends the process at once.

    Args:
        first: called at the first Ctrl-C.
        second: called before the process ends.
    """

    def __init__(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        self._first, self._second = first, second
        self._asked = False

    def asked(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self._asked

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _heard(self, _: int, __: FrameType | None) -> None:
        if self._asked:
            self._second()
            os._exit(INTERRUPTED)
        self._asked = True
        with contextlib.suppress(RuntimeError):  # it came in the middle of a write
            self._first()
