"""Code that runs inside a worker process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import cloudpickle
import torch

from steelyard.execution.process_lifecycle import kill_group, lead_group
from steelyard.execution.transport import Message, Parts, pack, receive, reply, unpack
from steelyard.spec.error_messages import describe, keep_place

Written = TypeVar("Written")


def prepare(threads: int) -> None:
    """Initialize a worker process."""
    lead_group()
    # The pool's own handler runs only between bytecodes, so a term stuck in C would survive it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def work(message: Message, path: list[str]) -> tuple[bool, Message]:
    """Run the call in `message`. Returns whether it succeeded, and its result or error."""
    if path != sys.path:
        sys.path[:] = path
    return answer(partial(receive, message), partial(reply, message))


def work_in_task(call: Parts, small: list[Parts | None], *large: Parts) -> Iterator[Any]:
    """As `work`, in a task of Ray: yield None when it starts, then the answer.

    Args:
        call: the call, without the objects that it shares with others.
        small: the shared objects; None for those that are in `large`.
        large: the shared objects that came through the object store.
    """
    yield None

    def read() -> Any:
        stored = iter(large)
        return unpack(
            call, [unpack(next(stored) if argument is None else argument) for argument in small]
        )

    succeeded, parts = answer(read, pack)
    yield [succeeded, parts]


def answer(read: Callable[[], Any], write: Callable[[object], Written]) -> tuple[bool, Written]:
    """Run the call that `read` unpickles. Returns as `work`, pickled by `write`."""
    try:
        fn, args = read()
    except Exception as error:  # noqa: BLE001 - unpickling runs user code
        return False, write(TransportError("the term or its data", error))
    try:
        result = fn(*args)
    except BaseException as error:  # noqa: BLE001 - sys.exit() must not end the worker either
        return False, write(_picklable(error))
    try:
        return True, write(result)
    except Exception as error:  # noqa: BLE001 - pickling runs user code
        return False, write(TransportError("its result", error))


class TransportError(Exception):  # the parent turns it into an UnpicklableError
    """An object cannot be unpickled, or pickled, in the worker."""

    def __init__(self, what: str, why: Exception | str) -> None:
        self.what = what
        self.why = why if isinstance(why, str) else describe(why)
        super().__init__(what, self.why)


def _picklable(error: BaseException) -> BaseException:
    """The error with its traceback and place kept; as a RuntimeError if it does not pickle."""
    trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):
        error.add_note(f"In the worker process:\n{trace}")
        keep_place(error)
        pickle.loads(cloudpickle.dumps(error))  # noqa: S301 - just made
        return error
    plain = RuntimeError(describe(error))
    plain.add_note(f"In the worker process:\n{trace}")
    keep_place(plain, error)
    return plain


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        kill_group(os.getpid())
