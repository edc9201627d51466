"""Data files: JSON Lines, checked line by line before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tinker import types

from steelyard.errors import DataError

Kind: TypeAlias = Literal["completion", "messages", "preference"]
# The data of one line: one, or a chosen and a rejected one.
Group: TypeAlias = list[types.Datum]

_KINDS: dict[Kind, set[str]] = {
    "completion": {"prompt", "completion"},
    "messages": {"messages"},
    "preference": {"chosen", "rejected"},
}
_FORMS = '{"prompt", "completion"}, {"messages": [...]} or {"chosen", "rejected"}'


@dataclass(frozen=True)
class DataFile:
    """The lines of a file that can be used.

    Attributes:
        kind: what its lines are.
        groups: their data, line by line.
        skipped: what was wrong with the lines that were left out.
    """

    kind: Kind
    groups: Sequence[Group]
    skipped: Sequence[str]


def read_records(
    path: str | Path, encode: Callable[[Kind, dict[str, Any]], Group], *, skip_bad: bool
) -> DataFile:
    """The data of a file.

    Args:
        path: a JSON Lines file; empty lines do not count.
        encode: the data of one line; raises ValueError with the rule that it breaks.
        skip_bad: leave malformed lines out.

    Raises:
        DataError: a line is malformed and may not be, or none is left.
    """
    groups: list[Group] = []
    wrong: list[str] = []
    kinds: dict[Kind, int] = {}
    for number, line in _lines(Path(path)):
        try:
            kind, record = _record(line)
            _check_kind(kind, kinds)
            groups.append(encode(kind, record))
            kinds.setdefault(kind, number)
        except ValueError as error:
            wrong.append(f"{path}:{number}: {error}")
    if wrong and not skip_bad:
        more = f" ({len(wrong) - 1} more lines are wrong.)" if len(wrong) > 1 else ""
        raise DataError(f"{wrong[0]}.{more} Mend it, or leave bad lines out with --skip-bad.")
    if not groups:
        raise DataError(f"{path} must hold at least one usable line, got none.")
    return DataFile(next(iter(kinds)), groups, wrong)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} must be a file that can be read: {error.strerror}.") from error
    for number, line in enumerate(content.split(b"\n"), 1):
        text = line.decode("utf-8", errors="surrogateescape").strip()
        if text:
            yield number, text


def _check_kind(kind: Kind, kinds: dict[Kind, int]) -> None:
    for first, number in kinds.items():
        if kind != first:
            raise ValueError(f"must be of one kind with line {number}, {first}, got {kind}")


def _record(line: str) -> tuple[Kind, dict[str, Any]]:
    try:
        line.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be UTF-8, and it is not") from None
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"must be JSON, and it is not: {error.msg} at column {error.colno}"
        ) from None
    except RecursionError:
        raise ValueError("must be JSON that is not nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError(f"must be an object, {_FORMS}, got {type(record).__name__}")  # noqa: TRY004 - one kind of error for all
    for kind, keys in _KINDS.items():
        if keys <= record.keys():
            return kind, record
    raise ValueError(f"must have the keys of {_FORMS}, got {sorted(record)}")
