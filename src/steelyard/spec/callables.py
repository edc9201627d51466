"""Inspect callables: whether they are async, and which arguments they accept."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterable
from typing import Any

from steelyard.spec.protocol import Regularizer, Stateful, TermFn

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
