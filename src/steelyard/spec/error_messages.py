"""Parts of error messages: names of terms, shortened values, errors of other libraries."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

# Where frames lie that are not the user's: "<" begins names such as "<frozen importlib>".
_OTHERS = (
    "<",
    f"{Path(__file__).parents[1]}{os.sep}",
    *(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")),
)
_FRAMES = "_steelyard_own_frames"
BASE = "base"  # the name of the base loss among the terms


def title(name: str, kind: str = "regularizer") -> str:
    """Name of a term in messages, after the word for its kind.

    Example:
        >>> title("l2"), title("short", "reward")
        ("regularizer 'l2'", "reward 'short'")
    """
    is_base = name == BASE and kind == "regularizer"
    return "the base loss" if is_base else f"{kind} {name!r}"


def shorten(text: str, longest: int, end: int = 0) -> str:
    """Text of at most `longest` characters, and `end` more of its end; says how long it was.

    Example:
        >>> shorten("abcdefgh", 8), shorten("abcdefgh", 3), shorten("abcdefghijkl", 3, 2)
        ('abcdefgh', 'abc…', 'abc… (7 more) …kl')
    """
    left = len(text) - longest - end
    if left <= 0:
        return text
    return f"{text[:longest]}… ({left} more) …{text[-end:]}" if end else f"{text[:longest]}…"


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


_Frame: TypeAlias = tuple[str, int, str, str | None]  # file, line, function, code


def _own_frames(error: BaseException) -> list[_Frame]:
    """Frames of the user's own code that an exception went through, the innermost last.

    Those that are neither of this library, nor of Python, nor of an installed package. Of an
    exception from another process, the ones that `keep_place` noted there.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return [(error.filename, error.lineno or 0, "<module>", error.text)]
    frames: list[_Frame] = [
        (frame.filename, frame.lineno or 0, frame.name, frame.line)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_OTHERS)
    ]
    return frames or getattr(error, _FRAMES, [])


def raised_at(error: BaseException) -> str:
    """File and line of the user's own code that raised an exception; empty if none did."""
    frames = _own_frames(error)
    return f"{frames[-1][0]}, line {frames[-1][1]}" if frames else ""


def quote_own_code(error: BaseException) -> bool:
    """Add the user's own lines that raised the cause of an error to it as a note, once.

    A traceback ends with the notes of the error, so that these lines stand below all frames of the
    library.

    Returns:
        Whether there are such lines.
    """
    frames = _own_frames(error.__cause__) if error.__cause__ is not None else []
    if not frames:
        return False
    note = "".join(traceback.format_list(frames)).rstrip()
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return True


def keep_place(error: BaseException, raised: BaseException | None = None) -> None:
    """Note the user's own frames of an exception that will be pickled, which loses its traceback.

    `raised` is the exception whose frames they are, if that is another one.
    """
    setattr(error, _FRAMES, _own_frames(raised or error))


def describe_with_place(error: BaseException) -> str:
    """Type, message, file and line of an exception of the user's own code."""
    if isinstance(error, SyntaxError):  # its own text has the file, without the folder
        return f"SyntaxError: {error.msg} ({raised_at(error)})"
    place = raised_at(error)
    return f"{describe(error)} ({place})" if place else describe(error)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Hint at the known name that is nearest to a wrong one; empty if none is near.

    Example:
        >>> did_you_mean("entrpy", ["entropy", "l1"])
        "; did you mean 'entropy'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
