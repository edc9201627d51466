"""Looking at callables: is it async, and can it take these arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

from steelyard.spec.protocol import Regularizer, TermFn


def entry_point(fn: Any) -> TermFn:
    """What to call for `fn`: its `compute` method if it has one, else `fn` itself."""
    if isinstance(fn, Regularizer) and not isinstance(fn, functools.partial):
        return fn.compute
    return fn  # type: ignore[no-any-return]  # validated as callable where the spec is built


def is_async(fn: Any) -> bool:
    """Whether calling `fn` gives a coroutine: also for async `__call__` and for partials."""
    fn = entry_point(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
        getattr(type(fn), "__call__", None)  # noqa: B004 - asks for the method, not whether callable
    )


def rejects(fn: TermFn, keywords: Iterable[str]) -> str | None:
    """Why `fn(data, logprobs, **keywords)` cannot be called, or None if it can."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins and some C functions show no signature
        return None
    try:
        signature.bind(None, None, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None
