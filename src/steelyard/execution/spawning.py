"""How worker processes come to be: quickly, and without importing the main script again."""

from __future__ import annotations

import contextvars
import sys
from multiprocessing import context, spawn
from multiprocessing.context import BaseContext
from typing import Any

_ours = contextvars.ContextVar("_ours", default=False)
_preparation_data = spawn.get_preparation_data


def _get_preparation_data(name: str) -> dict[str, Any]:
    """As multiprocessing has it, but a worker of ours does not import the main script again.

    Terms travel by value, so nobody needs that import; and without it process terms work
    from scripts that have no `__main__` guard. All other processes are prepared as before.
    """
    data = _preparation_data(name)
    if _ours.get():
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


spawn.get_preparation_data = _get_preparation_data


if sys.platform == "linux":

    class _Process(context.ForkServerProcess):
        @staticmethod
        def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
            token = _ours.set(True)
            try:
                return context.ForkServerProcess._Popen(process_obj)  # noqa: SLF001 - as contexts do
            finally:
                _ours.reset(token)

    class _Context(context.ForkServerContext):
        Process = _Process

    def worker_context(preload: str) -> BaseContext:
        """Workers are forked, in milliseconds, from a server that has imported `preload`.

        The server imports and does nothing else: it has no threads that a fork would lose.
        """
        made = _Context()
        made.set_forkserver_preload([preload])
        return made

else:

    class _Process(context.SpawnProcess):
        @staticmethod
        def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
            token = _ours.set(True)
            try:
                return context.SpawnProcess._Popen(process_obj)  # noqa: SLF001 - as contexts do
            finally:
                _ours.reset(token)

    class _Context(context.SpawnContext):
        Process = _Process

    def worker_context(preload: str) -> BaseContext:  # noqa: ARG001 - a fresh process cannot
        """Workers are fresh processes: forking is not safe on this platform."""
        return _Context()
