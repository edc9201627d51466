"""How worker processes come to be: quickly, and without importing the main script again."""

from __future__ import annotations

import contextvars
import sys
from multiprocessing import spawn
from multiprocessing.context import BaseContext
from typing import Any

if sys.platform == "linux":
    from multiprocessing.context import ForkServerContext as StartContext
    from multiprocessing.context import ForkServerProcess as StartedProcess
else:
    from multiprocessing.context import SpawnContext as StartContext
    from multiprocessing.context import SpawnProcess as StartedProcess

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


class _Process(StartedProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        token = _ours.set(True)
        try:
            return StartedProcess._Popen(process_obj)  # noqa: SLF001 - as every context does
        finally:
            _ours.reset(token)


class _Context(StartContext):
    Process = _Process


def worker_context(preload: str) -> BaseContext:
    """How to start workers that need the module `preload`.

    On Linux they are forked, in milliseconds, from a server that has imported it and done
    nothing else, so that it has no threads which a fork would lose. Elsewhere forking is not
    safe, and each worker is a fresh process that imports it itself.
    """
    made = _Context()
    if sys.platform == "linux":
        made.set_forkserver_preload([preload])
    return made
