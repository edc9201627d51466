"""Random numbers that a term draws in a call: the same in whatever thread or process it runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

# Seconds of one wait: CPython does not wake a wait that begins just after a signal was caught.
_LONGEST_WAIT = 1.0


class _Queue:
    """Turns that are held, and those that wait for them, in order."""

    def __init__(self, holder: Turn | None = None) -> None:
        self.holder = holder  # of the turn inside of which these are taken
        self.lock = threading.Lock()
        self.held: set[Turn] = set()
        self.waiting: deque[Turn] = deque()

    def grant(self) -> None:
        """Grant the turns that are next; called with the lock."""
        while self.waiting:
            group = self.waiting[0].group
            if self.held and (group is None or any(turn.group is not group for turn in self.held)):
                return
            turn = self.waiting.popleft()
            self.held.add(turn)
            turn.since = monotonic()
            turn.granted.set_result(None)


_of_process = _Queue()
_queue: ContextVar[_Queue] = ContextVar("_queue", default=_of_process)


class Turn:
    """The right to change the global random generators, for as long as it is held.

    Args:
        group: turns of the same group, such as the coroutines of an event loop, are held together,
            since they never run at the same moment; None: it is held alone.

    Attributes:
        group: as given.
        granted: done once the turn is held, or ended before that.
        since: the time from which it is held; None before.
    """

    def __init__(self, group: object = None) -> None:
        self.group = group
        self.granted: Future[None] = Future()
        # As a running future it cannot be cancelled by those who wait for it.
        self.granted.set_running_or_notify_cancel()
        self.since: float | None = None
        self._queue = _queue.get()
        self._inner = _Queue(self)
        self._undo: Callable[[], object] | None = None
        self._ended = False

    def take(self) -> None:
        """Wait until it is held, or was ended by another thread."""
        self._request()
        while not self.granted.done():
            with contextlib.suppress(TimeoutError):
                self.granted.result(_LONGEST_WAIT)

    async def take_async(self) -> None:
        """As `take`, awaited."""
        self._request()
        await asyncio.wrap_future(self.granted)

    def end(self) -> None:
        """Undo the change that is in force, and let the next ones have their turn."""
        queue = self._queue
        with queue.lock:
            if self._ended:
                return
            self._ended = True
            if self._undo is not None:
                self._undo()
                self._undo = None
            if self in queue.held:
                queue.held.remove(self)
            else:
                if self in queue.waiting:
                    queue.waiting.remove(self)
                self.granted.set_result(None)
            queue.grant()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Let the block, and what it starts, take turns inside of this one; end it afterwards."""
        entered = _queue.set(self._inner)
        try:
            yield
        finally:
            _queue.reset(entered)
            self.end()

    def change(self, undo: Callable[[], object]) -> bool:
        """Record how to undo a change, in case the turn ends before the work does.

        False if it has ended: nothing may be changed then.
        """
        with self._queue.lock:
            if not self._ended:
                self._undo = undo
            return not self._ended

    def undo(self) -> bool:
        """Undo the change; False if the turn has ended, and that did it."""
        with self._queue.lock:
            undo, self._undo = self._undo, None
            if undo is not None:
                undo()
            return undo is not None

    def _request(self) -> None:
        queue = self._queue
        with queue.lock:
            if not self._ended:
                queue.waiting.append(self)
                queue.grant()


@contextlib.contextmanager
def taken_turn() -> Iterator[Turn]:
    """Take a turn in this thread; it ends with the block."""
    turn = Turn()
    try:
        turn.take()
        yield turn
    finally:
        turn.end()


def current_turn() -> Turn | None:
    """The turn inside of which the caller runs."""
    return _queue.get().holder


if hasattr(os, "register_at_fork"):  # the threads that hold turns are the parent's
    os.register_at_fork(after_in_child=_of_process.__init__)  # type: ignore[misc]  # as it was made


T = TypeVar("T")


@dataclass(frozen=True)
class Randomness:
    """Key and settings with which a call of a term draws the same numbers wherever it runs.

    Attributes:
        key: whole numbers >= 0: the seed, the step, and what tells the calls of a step apart.
        generator: whether the function takes `generator=`.
        seeds_global: whether the global generators are seeded around the call.
        watched: whether to find out if it draws from them.
    """

    key: tuple[int, ...]
    generator: bool
    seeds_global: bool
    watched: bool

    def arguments(self, device: torch.device) -> dict[str, torch.Generator]:
        """The keyword argument `generator`, if the function takes it, for tensors on a device."""
        if not self.generator:
            return {}
        return {"generator": torch.Generator(device).manual_seed(_seeds(self.key, 1)[0])}

    def states(self) -> GlobalStates:
        """States of the global generators for one call."""
        return GlobalStates(self.key, watched=self.watched)


class GlobalStates:
    """States of the global generators that belong to a call, seeded by a key.

    Use it as a context manager, inside a `Turn` if there are other threads; or let it run a
    coroutine, which has these states while it runs and leaves the others in force while it waits.

    Args:
        key: seeds the generators.
        watched: whether to find out if the work draws from them.

    Attributes:
        drew: whether it did, if it is watched.
    """

    def __init__(self, key: Sequence[int], *, watched: bool) -> None:
        self.drew = False
        self._key, self._watched = key, watched
        self._turn: Turn | None = None
        self._outer: _States | None = None
        self._states: _States | None = None

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        """Put the states in force: seeded ones at first, then those that were left."""
        outer, self._turn = _States.get(), current_turn()
        if self._turn is not None and not self._turn.change(outer.set):
            return  # the call has overrun its time limit, and the generators are another's
        self._outer = outer
        if self._states is not None:
            self._states.set()
            return
        _seed_all(self._key)
        if self._watched:
            self._states = _States.get()

    def leave(self, *, keep: bool = False) -> None:
        """Restore the states that were in force before.

        Args:
            keep: keep the present ones, to enter them again.
        """
        states = _States.get() if keep or self._watched else None
        outer, self._outer = self._outer, None
        if outer is None:
            return
        if self._turn is None:
            outer.set()
        elif not self._turn.undo():
            return
        if states is not None:
            self.drew = self._watched and (self.drew or not states.equals(self._states))
            self._states = states

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine."""
        return await _Steps(self, coroutine)


class _Steps(Awaitable[T]):
    """Awaits a coroutine, in some states of the global generators between its waits."""

    def __init__(self, states: GlobalStates, coroutine: Coroutine[Any, Any, T]) -> None:
        self._states, self._coroutine = states, coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine = self._coroutine
        step = partial(coroutine.send, None)
        while True:
            self._states.enter()
            waits = False
            try:
                awaited = step()
                waits = True
            except StopIteration as stop:
                value: T = stop.value
                return value
            finally:
                self._states.leave(keep=waits)
            try:
                sent = yield awaited
            except BaseException as error:  # noqa: BLE001 - a cancellation too is the coroutine's
                step = partial(coroutine.throw, error)
            else:
                step = partial(coroutine.send, sent)


@dataclass(frozen=True)
class _States:
    """States of the global generators."""

    python: object
    numpy: dict[str, Any]
    torch: list[Tensor]

    @classmethod
    def get(cls) -> _States:
        """The present states."""
        return cls(
            random.getstate(),
            np.random.get_state(legacy=False),  # noqa: NPY002 - users' own
            [generator.get_state() for generator in _torch_generators()],
        )

    def set(self) -> None:
        """Set the generators to these states."""
        random.setstate(self.python)  # type: ignore[arg-type]  # typeshed leaves it untyped
        np.random.set_state(self.numpy)  # noqa: NPY002
        for generator, state in zip(_torch_generators(), self.torch, strict=False):
            generator.set_state(state)

    def equals(self, other: _States | None) -> bool:
        """Whether the states are the same."""
        return (
            other is not None
            and self.python == other.python
            # Its arrays are too long for their representation to be whole: they are bytes here.
            and _plain(self.numpy) == _plain(other.numpy)
            and len(self.torch) == len(other.torch)
            and all(map(torch.equal, self.torch, other.torch))
        )


def _plain(state: Any) -> Any:
    """A state of NumPy with its arrays as bytes."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _torch_generators() -> list[torch.Generator]:
    """Torch's generators on the CPU and, once CUDA is in use, on its devices."""
    # A device that is put into use during a call is left alone: its generator had no state before.
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # untyped in torch
    on_cuda = torch.cuda.default_generators if in_use else ()
    return [torch.default_generator, *on_cuda]


def _seed_all(key: Sequence[int]) -> None:
    of_python, of_numpy, of_torch = _seeds(key, 3)
    random.seed(of_python)
    np.random.seed(of_numpy >> 32)  # noqa: NPY002 - users' own
    for generator in _torch_generators():
        generator.manual_seed(of_torch)


def _seeds(key: Sequence[int], count: int) -> list[int]:
    """Independent seeds of 63 bits, derived from a key."""
    seeds: list[int] = (np.random.SeedSequence(key).generate_state(count, np.uint64) >> 1).tolist()
    return seeds
