"""Start method of worker processes: fast, and without importing the main script again."""

from __future__ import annotations

import contextlib
import contextvars
import os
import re
import signal
import sys
from multiprocessing import forkserver, process, resource_tracker, spawn
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

if sys.platform == "linux":
    from multiprocessing.context import ForkServerContext as StartContext
    from multiprocessing.context import ForkServerProcess as StartedProcess
else:
    from multiprocessing.context import SpawnContext as StartContext
    from multiprocessing.context import SpawnProcess as StartedProcess

# Process ids of workers that were killed because their fork server died, not because of a term.
lost_workers: set[int] = set()
_UNKNOWN = 255  # multiprocessing's code where the fork server cannot say how a process ended
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has named semaphores
_SEMAPHORE = re.compile(rf" (\d+) +{_SHARED_MEMORY}/sem\.")
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
    def terminate(self) -> None:
        """Kill the worker and the processes that it has started.

        A term may ignore SIGTERM, or loop in C, or be stopped; only SIGKILL ends it in time.
        """
        if self.pid is not None and self.is_alive():
            semaphores = _semaphores_of(self.pid) - _semaphores_of(os.getpid())
            kill_group(self.pid)
            super().kill()  # one that has just started does not lead a group yet
            _remove_semaphores(semaphores)

    def is_alive(self) -> bool:
        """Whether the worker runs, as far as the fork server knows.

        If the server itself dies, its workers go on and count as dead, with the code 255. They
        are killed then, since nothing could stop them later.
        """
        alive, pid = super().is_alive(), self.pid
        if not alive and pid and self.exitcode == _UNKNOWN and _exists(pid):
            lost_workers.add(pid)
            kill_group(pid)
        return alive

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        token = _ours.set(True)
        try:
            return StartedProcess._Popen(process_obj)  # noqa: SLF001 - as every context does
        finally:
            _ours.reset(token)


class _Context(StartContext):
    Process = _Process


def _semaphores_of(pid: int) -> set[int]:
    """Inodes of the named semaphores that a process has open; none where it is not Linux."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended, or there is no /proc
        return set()
    # Not their paths: the one who made a semaphore has mapped it by another, which is gone.
    return {int(inode) for inode in _SEMAPHORE.findall(maps)}


def _remove_semaphores(inodes: set[int]) -> None:
    """Remove the semaphores of a killed worker, such as that of tqdm's lock.

    A worker has the resource tracker of this process, which would remove them when the program
    ends, and warn that they have leaked.
    """
    for file in _SHARED_MEMORY.glob("sem.mp-*") if inodes else ():
        with contextlib.suppress(OSError):
            if file.stat().st_ino in inodes:
                file.unlink()
                resource_tracker.unregister(file.name.replace("sem.", "/", 1), "semaphore")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def lead_group() -> None:
    """Make this process the leader of a group of its own, with all that it will start."""
    if sys.platform != "win32":
        os.setpgid(0, 0)


def kill_group(leader: int) -> None:
    """Kill a worker and all that it has started; also the rest of the group of one that died."""
    with contextlib.suppress(OSError):  # it is gone
        if sys.platform == "win32":
            os.kill(leader, signal.SIGTERM)
        else:
            os.killpg(leader, signal.SIGKILL)


def forget_parents_processes() -> None:
    """In a forked child: forget the fork server and the children of the parent.

    They are no children of this process, so multiprocessing can neither wait for them nor stop
    them, and would fail at the next start of a process and at exit.
    """
    server: Any = forkserver._forkserver  # noqa: SLF001 - there is no other way, as below
    preload = server._preload_modules  # noqa: SLF001
    type(server).__init__(server)
    server.set_forkserver_preload(preload)
    process._children.clear()  # type: ignore[attr-defined]  # noqa: SLF001


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
