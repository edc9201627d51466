"""Start method of worker processes: fast, and without importing the main script again."""

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
    """As in multiprocessing, but our own workers do not import the main script again.

    Terms are pickled by value, so the import is not needed; without it process terms work
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
    """Build the multiprocessing context for workers that need the module `preload`.

    On Linux they are forked, in milliseconds, from a fork server that has only imported this
    module: it has no threads, which a fork would lose. On other systems forking is not safe,
    and each worker is a new process that imports the module itself.
    """
    made = _Context()
    if sys.platform == "linux":
        made.set_forkserver_preload([preload])
    return made
