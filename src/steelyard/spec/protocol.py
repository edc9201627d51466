"""Protocols of terms, and inspection of callables: async or not, and their arguments."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

# A loss is a torch tensor, a NumPy value or a number; this stage loads none of those libraries.
Metrics: TypeAlias = Mapping[str, float]
TermFn: TypeAlias = Callable[..., Any]
Schedule: TypeAlias = Callable[[int], float]


@runtime_checkable
class Regularizer(Protocol):
    """An object with `compute(data, logprobs, **options) -> loss | (loss, metrics)`.

    `compute` may be async. It returns None for a batch in which it has nothing to measure: the
    term is then left out of the call. Optional members are used when they are there: `name`, the
    default name of its spec; `run_in` and `gradient`, what `"auto"` means for it in a spec;
    `state_dict()` / `load_state_dict(state)`, with which the pipeline saves and restores the
    state that the regularizer keeps from batch to batch; and `measure`, called like `compute` to
    measure the regularizer on held-out data: it returns the quantity itself, defined alike in
    every run whatever the state is, and does not advance the state. Without it, `compute` is
    called, of a copy if there is state. Two are sentences, for messages: `measures_only`, why the
    term must not be trained on, for one with these options, which a spec then refuses unless its
    weight is 0 or its `gradient` `"none"`; and `zero_means`, what it says of a term that its value
    is 0 at one step after the other, which the doctor then gives as the cause.

    Example:
        >>> class Brevity:
        ...     name = "brevity"
        ...     def compute(self, data, logprobs):
        ...         return sum(len(lp) for lp in logprobs)
        >>> isinstance(Brevity(), Regularizer)
        True
    """

    @property
    def compute(self) -> TermFn:
        """A method that returns the penalty of a batch, alone or with a mapping of metrics."""


@runtime_checkable
class Stateful(Protocol):
    """An object with state: `state_dict()` and `load_state_dict(state)`."""

    def state_dict(self) -> Any:
        """State to save."""

    def load_state_dict(self, state: Any) -> object:
        """Restore a saved state."""


@runtime_checkable
class ChoosesNeeds(Protocol):
    """A regularizer that reads extra inputs with some data: `needs_for(data, gives, own=...)`.

    `Entropy`, for one, reads the whole vocabulary where the tokens of the data were not sampled.
    """

    def needs_for(self, data: Any, gives: Collection[str], *, own: bool = False) -> tuple[str, ...]:
        """Extra inputs that `compute` receives with these data, of those that the client gives.

        Args:
            data: that it reads.
            gives: names of the extra inputs that are available.
            own: whether they are data of the term's own.
        """


_KIND = inspect.Parameter
_BY_POSITION = (_KIND.POSITIONAL_ONLY, _KIND.POSITIONAL_OR_KEYWORD)
_BY_NAME = (_KIND.POSITIONAL_OR_KEYWORD, _KIND.KEYWORD_ONLY)


def entry_point(fn: Any) -> TermFn:
    """The callable of a term: the `compute` method of `fn` if it has one, else `fn` itself."""
    if isinstance(fn, Regularizer) and not isinstance(fn, functools.partial):
        return fn.compute
    return fn  # type: ignore[no-any-return]  # validated as callable where the spec is built


def measurement(fn: Any) -> TermFn:
    """The callable that measures a term for evaluation, and leaves its state in training alone.

    It is the `measure` method of `fn` if it has one. Otherwise it is the callable of the term, of
    a copy of `fn` if `fn` has state.
    """
    if isinstance(fn, Regularizer) and not isinstance(fn, functools.partial):
        measure: TermFn | None = getattr(fn, "measure", None)
        if callable(measure):
            return measure
    return entry_point(copy.deepcopy(fn) if isinstance(fn, Stateful) else fn)


def is_async(fn: Any) -> bool:
    """Whether calling `fn` returns a coroutine, also for async `__call__` and partials."""
    fn = entry_point(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(type(fn), "__call__", None)  # noqa: B004 - asks for the method, not whether callable
    )


def rejects(fn: TermFn, keywords: Iterable[str], *, positional: int = 2) -> str | None:
    """Reason why `fn` does not accept these arguments, with its options; None if it does.

    Args:
        fn: the callable. One without a signature is assumed to accept them.
        keywords: names of the options.
        positional: number of positional arguments; 2 for `(data, logprobs)`.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins and some C functions show no signature
        return None
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{error}; its options are {listed(options_of(fn, positional=positional))}"
    return None


def takes_generator(fn: Any) -> bool:
    """Whether `fn` takes the keyword argument `generator`; a wrapper may say so itself."""
    own = getattr(fn, "takes_generator", None)
    if isinstance(own, bool):
        return own
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
    return "generator" in parameters and parameters["generator"].kind in _BY_NAME


def options_of(fn: TermFn, *, positional: int = 2) -> tuple[str, ...]:
    """Names of the options of a function, after its first `positional` parameters.

    Example:
        >>> options_of(lambda data, logprobs, scale=1.0, *, floor=0.0: 0.0)
        ('scale', 'floor')
    """
    parameters = inspect.signature(fn).parameters.values()
    given = [p for p in parameters if p.kind in _BY_POSITION][:positional]
    return tuple(p.name for p in parameters if p.kind in _BY_NAME and p not in given)


def listed(names: Iterable[str]) -> str:
    """Format names for a message.

    Example:
        >>> listed(["l1", "l2"]), listed([])
        ("'l1', 'l2'", 'none')
    """
    return ", ".join(repr(name) for name in names) or "none"
