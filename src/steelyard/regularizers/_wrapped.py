"""Build the regularizer that another one wraps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.errors import SpecError
from steelyard.regularizers import _options
from steelyard.spec import Regularizer, build, entry_point, rejects


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
