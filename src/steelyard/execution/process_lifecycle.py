"""Start and end of processes: workers, and children that a term has forked.

A worker starts without importing the main script again, and is killed with all that it has started.

Both processes return from `os.fork()`. A child that does not end inside the term would go on as the
program itself does: train, write to the same files, answer for a worker on its pipe; or wait for
ever for threads that the fork has not copied, and keep the terminal's pipe open. `ForkGuard` ends
it.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver, process, resource_tracker, spawn
from multiprocessing.context import BaseContext
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from steelyard.spec.error_messages import describe, title

if sys.platform == "linux":
    from multiprocessing.context import ForkServerContext as StartContext
    from multiprocessing.context import ForkServerProcess as StartedProcess
else:
    from multiprocessing.context import SpawnContext as StartContext
    from multiprocessing.context import SpawnProcess as StartedProcess

# Process ids of workers that were killed because their fork server died, not because of a term.
lost_workers: set[int] = set()
_LOG = logging.getLogger(__name__)
_CAME_BACK = 70  # EX_SOFTWARE
_UNKNOWN = 255  # multiprocessing's code where the fork server cannot say how a process ended
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux has named semaphores
_SEMAPHORE = re.compile(rf" (\d+) +{_SHARED_MEMORY}/sem\.")
# Whether the process that this thread starts is a worker.
_starts_worker = contextvars.ContextVar("_starts_worker", default=False)
_preparing = threading.Lock()


@contextlib.contextmanager
def _without_main_script() -> Iterator[None]:
    """Let the process that is started inside the block not import the main script again.

    Terms are pickled by value, so the import is not needed; without it process terms work
    from scripts that have no `__main__` guard. Python has no other way to leave it out than to
    replace the function that describes the program to the new process. It is replaced for the
    block alone, and processes that other threads start meanwhile are prepared as before.
    """
    with _preparing:
        prepare = spawn.get_preparation_data

        def prepare_worker(name: str) -> dict[str, Any]:
            data: dict[str, Any] = prepare(name)
            if _starts_worker.get():
                data.pop("init_main_from_name", None)
                data.pop("init_main_from_path", None)
            return data

        spawn.get_preparation_data = prepare_worker
        token = _starts_worker.set(True)
        try:
            yield
        finally:
            _starts_worker.reset(token)
            spawn.get_preparation_data = prepare


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
        with _without_main_script():
            return StartedProcess._Popen(process_obj)  # noqa: SLF001 - as every context does


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
    global _preparing  # noqa: PLW0603 - another thread of the parent may have held it
    _preparing = threading.Lock()
    server: Any = forkserver._forkserver  # noqa: SLF001 - there is no other way, as below
    type(server).__init__(server)
    process._children.clear()  # type: ignore[attr-defined]  # noqa: SLF001


def worker_context(preload: str) -> BaseContext:
    """Build the multiprocessing context for workers that need the module `preload`.

    On Linux they are forked, in milliseconds, from a fork server that has only imported this
    module: it has no threads, which a fork would lose. On other systems forking is not safe,
    and each worker is a new process that imports the module itself.
    """
    context = _Context()
    if sys.platform == "linux":
        context.set_forkserver_preload([preload])
    return context


class ForkGuard:
    """Around a call of a term: a child that was forked inside ends here.

    Args:
        name: of the term.
        kind: the word for the term in messages.
    """

    __slots__ = ("_kind", "_name", "_pid")

    def __init__(self, name: str, kind: str = "regularizer") -> None:
        self._name, self._kind = name, kind

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            _end(title(self._name, self._kind), error)


def _end(term: str, error: BaseException | None) -> NoReturn:
    """End this process: without its exit functions and buffers, which are the parent's."""
    if isinstance(error, SystemExit):  # as it was meant
        code = error.code
        os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))
    how = "returned" if error is None else f"failed ({describe(error)})"
    _LOG.error(
        "%s must end the processes that it forks, and one of them %s: it was ended, and the call "
        "goes on in its parent. Call os._exit() at the end of the child, or use subprocess.",
        term,
        how,
    )
    os._exit(_CAME_BACK)
