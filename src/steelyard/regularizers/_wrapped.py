"""Regularizers that compute another one: its properties, and how an option describes it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import isawaitable
from typing import Any

from steelyard.errors import SpecError
from steelyard.regularizers import _options
from steelyard.spec.protocol import Regularizer, entry_point, is_async, measurement, rejects
from steelyard.spec.registry import build


class Wrapper:
    """Base of regularizers that compute another one, with the properties that follow from it.

    A subclass has the methods `_compute` and `_acompute`, which is the same as a coroutine.

    Attributes:
        regularizer: The wrapped one: an object with `compute`, or a function.
        call_options: Options of its calls.
    """

    regularizer: Any
    call_options: dict[str, Any]
    _compute: Callable[..., Any]
    _acompute: Callable[..., Any]

    @property
    def gradient(self) -> str:
        """Gradient method of the wrapped regularizer."""
        return str(getattr(self.regularizer, "gradient", "auto"))

    @property
    def measures_only(self) -> str:
        """Why the wrapped regularizer must not be trained on; empty if it may."""
        return str(getattr(self.regularizer, "measures_only", ""))

    @property
    def zero_means(self) -> str:
        """Cause that the doctor gives where the wrapped regularizer's value stays 0."""
        return str(getattr(self.regularizer, "zero_means", ""))

    @property
    def compute(self) -> Any:
        """Function that computes the term; async if the wrapped regularizer is."""
        return self._acompute if is_async(self.regularizer) else self._compute

    @property
    def measure(self) -> Any:
        """Function that measures the wrapped regularizer, as it is, on held-out data."""
        return functools.partial(measurement(self.regularizer), **self.call_options)


def then(returned: Any, fn: Callable[[Any], Any]) -> Any:
    """Apply `fn` to what a term returned; if that is a coroutine, return one of the result."""
    if not isawaitable(returned):
        return fn(returned)

    async def applied() -> Any:
        return fn(await returned)

    return applied()


def build_wrapped(regularizer: Any, wrapper: str) -> tuple[Any, dict[str, Any]]:
    """Build the regularizer that an option describes; also return the options of its calls.

    Args:
        regularizer: an object, a function, a registered name, or `{"fn": ..., "options": {...}}`.
        wrapper: the name of the regularizer that wraps it, for messages.

    Raises:
        SpecError: it is none of these, or does not accept `(data, logprobs)` and its options.
        RegistryError: it is a name that is not registered.
    """
    if isinstance(regularizer, Mapping):
        unknown = sorted(set(regularizer) - {"fn", "options"})
        if unknown or "fn" not in regularizer:
            raise SpecError(
                f"regularizer must have the fields 'fn' and, if need be, 'options', got "
                f"{sorted(map(str, regularizer))} (regularizer {wrapper!r})."
            )
        fn, options = regularizer["fn"], dict(regularizer.get("options") or {})
    else:
        fn, options = regularizer, {}
    if isinstance(fn, str):
        fn, options = build(fn, options)
    rule = "a regularizer, or the name of one"
    _options.require(callable(fn) or isinstance(fn, Regularizer), "regularizer", rule, fn, wrapper)
    reason = rejects(entry_point(fn), options)
    if reason is not None:
        raise SpecError(
            f"regularizer must accept (data, logprobs) and the options {list(options)}: {reason} "
            f"(regularizer {wrapper!r})."
        )
    return fn, options
