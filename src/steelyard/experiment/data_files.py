"""Read data files (JSON Lines), and check every line before training."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from tinker import types

from steelyard.errors import DataError

Kind: TypeAlias = Literal["completion", "messages", "preference"]
# Data of one line: one datum, or a chosen and a rejected one.
Group: TypeAlias = list[types.Datum]

T = TypeVar("T")

_KINDS: dict[Kind, set[str]] = {
    "completion": {"prompt", "completion"},
    "messages": {"messages"},
    "preference": {"chosen", "rejected"},
}
_FORMS = '{"prompt", "completion"}, {"messages": [...]} or {"chosen", "rejected"}'

_PROMPT_FORMS = '{"prompt"} or {"messages": [...]}'


@dataclass(frozen=True)
class DataFile:
    """Data of the valid lines of a file.

    Attributes:
        kind: format of the lines.
        groups: data of each line.
        lines: number of each line in the file, from 1.
        skipped: an error message for each line that was skipped.
    """

    kind: Kind
    groups: Sequence[Group]
    lines: Sequence[int]
    skipped: Sequence[str]


def read_records(
    path: str | Path, encode: Callable[[Kind, dict[str, Any]], Group], *, skip_bad: bool
) -> DataFile:
    """Read and encode the lines of a file, which must all have the format of the first.

    Args:
        path: a JSON Lines file; empty lines are ignored.
        encode: converts a line to data; raises ValueError, with the rule, for an invalid one.
        skip_bad: skip malformed lines instead of raising.

    Raises:
        DataError: a line is malformed and `skip_bad` is False, or no valid line is left.
    """
    kinds: dict[Kind, int] = {}  # the kind of the file, and the line that set it

    def parse(number: int, line: str) -> Group:
        kind, record = _parse(line)
        _check_kind(kind, kinds)
        group = encode(kind, record)
        kinds.setdefault(kind, number)
        return group

    parsed, errors = parse_lines(path, parse, skip_bad=skip_bad)
    return DataFile(next(iter(kinds)), list(parsed.values()), list(parsed), errors)


def parse_lines(
    path: str | Path, parse: Callable[[int, str], T], *, skip_bad: bool
) -> tuple[dict[int, T], list[str]]:
    """Parse the lines of a JSON Lines file; empty lines are ignored.

    Args:
        path: the file.
        parse: takes the number of a line, from 1, and its text; raises ValueError, with the rule,
            for an invalid line.
        skip_bad: skip invalid lines instead of raising.

    Returns:
        What `parse` returned, by the number of the line, and an error for each skipped line.

    Raises:
        DataError: a line is invalid and `skip_bad` is False, or no valid line is left.
    """
    parsed: dict[int, T] = {}
    errors: list[str] = []
    for number, line in _lines(Path(path)):
        try:
            parsed[number] = parse(number, line)
        except ValueError as error:
            errors.append(f"{path}:{number}: {error}")
    if errors and not skip_bad:
        more = f" ({len(errors) - 1} more lines are wrong.)" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}.{more} Fix it, or skip bad lines with --skip-bad.")
    if not parsed:
        raise DataError(f"{path} must hold at least one usable line, got none.")
    return parsed, errors


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} must be a file that can be read: {error.strerror}.") from error
    # Only b"\n" ends a line: str.splitlines would also split at U+2028 inside a JSON string.
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, 1):
        text = line.decode("utf-8", errors="surrogateescape").strip()
        if text:
            yield number, text


def _check_kind(kind: Kind, kinds: dict[Kind, int]) -> None:
    for first, number in kinds.items():
        if kind != first:
            raise ValueError(f"must be of one kind with line {number}, {first}, got {kind}")


def parse_object(line: str, forms: str = _FORMS) -> dict[str, Any]:
    """Parse a line that holds a JSON object; `forms` describes the objects, for the error.

    Raises:
        ValueError: it is none; the message is the rule.
    """
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
        raise ValueError(f"must be an object, {forms}, got {type(record).__name__}")  # noqa: TRY004 - callers catch ValueError
    return record


def parse_prompt(line: str) -> dict[str, Any]:
    """Parse a line that holds a prompt: an object with `"prompt"` or `"messages"`.

    Raises:
        ValueError: it is none; the message is the rule.
    """
    record = parse_object(line, _PROMPT_FORMS)
    if not {"prompt", "messages"} & record.keys():
        raise ValueError(f"must have the keys of {_PROMPT_FORMS}, got {sorted(record)}")
    return record


def _parse(line: str) -> tuple[Kind, dict[str, Any]]:
    record = parse_object(line)
    for kind, keys in _KINDS.items():
        if keys <= record.keys():
            return kind, record
    raise ValueError(f"must have the keys of {_FORMS}, got {sorted(record)}")
