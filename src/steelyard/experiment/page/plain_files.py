"""Read files of run folders: regular files only, never through a symbolic link, in parts."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")

MAX_LINE = 2**20  # bytes of a line; a longer one is no line that a run writes
_CHUNK = 2**16
_MAX_FILE = 2**22  # bytes of a file that is read whole


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: it does not exist, or is a link, a pipe, a device or a folder.
    """
    # O_NONBLOCK: opening a pipe would otherwise wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")


def read_first_line(path: Path) -> bytes:
    """First line of a file; empty if none is complete, it is too long, or it cannot be read."""
    try:
        with open_plain(path) as file:
            line = file.readline(MAX_LINE)
    except OSError:
        return b""
    return line if line.endswith(b"\n") else b""


def read_small(path: Path) -> bytes:
    """Read a whole file.

    Raises:
        OSError: it cannot be read, or is larger than a file of its kind.
    """
    with open_plain(path) as file:
        content = file.read(_MAX_FILE + 1)
    if len(content) > _MAX_FILE:
        raise OSError(f"{path} is larger than {_MAX_FILE} bytes")
    return content


def read_object(path: Path) -> dict[str, Any]:
    """JSON object in a small file; empty if there is none, or it cannot be read."""
    try:
        return parse_object(read_small(path)) or {}
    except OSError:
        return {}


def read_last(path: Path, parse: Callable[[bytes], T | None]) -> T | None:
    """Parse the last complete line of a file of which `parse` makes something.

    Returns:
        None if there is no such line near the end of the file, or if it cannot be read.
    """
    size = _CHUNK
    while True:
        tail, whole = read_tail(path, size)
        lines = tail.split(b"\n")[:-1]
        # The first line of a tail may have begun before it.
        for line in reversed(lines if whole else lines[1:]):
            parsed = parse(line)
            if parsed is not None:
                return parsed
        if whole or size > MAX_LINE:
            return None
        size *= 4


def read_tail(path: Path, size: int) -> tuple[bytes, bool]:
    """Last `size` bytes of a file, and whether these are all of it; empty if it cannot be read."""
    try:
        with open_plain(path) as file:
            length = os.fstat(file.fileno()).st_size
            file.seek(max(0, length - size))
            return file.read(size), length <= size
    except OSError:
        return b"", True


def read_last_objects(path: Path, size: int) -> tuple[list[dict[str, Any]], bool]:
    """JSON objects in the last `size` bytes of a JSON Lines file, and whether these are all.

    Damaged lines are left out; numbers that are not finite become None, as JSON has none.
    """
    tail, whole = read_tail(path, size)
    lines = tail.split(b"\n")[:-1]
    objects = (parse_object(line, finite=True) for line in (lines if whole else lines[1:]))
    return [value for value in objects if value is not None], whole


def parse_object(text: bytes, *, finite: bool = False) -> dict[str, Any] | None:
    """JSON object in a text; None if there is none.

    Args:
        text: the text.
        finite: whether numbers that are not finite become None.
    """
    try:
        convert = _finite if finite else None
        value = json.loads(text, parse_float=convert, parse_constant=convert)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None
