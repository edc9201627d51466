"""Text for error messages."""

from __future__ import annotations


def describe(error: BaseException) -> str:
    """Type and message of an exception of anybody's code, whose `str()` may raise itself.

    Example:
        >>> describe(KeyError("x"))
        "KeyError: 'x'"
    """
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001 - see above
        return f"{name} (its message cannot be read)"
