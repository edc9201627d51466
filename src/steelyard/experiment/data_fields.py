"""Check that lines of data have what the terms read: their fields, and pairs for preferences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from steelyard.errors import DataError
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.data_files import DataFile
from steelyard.gradients import loss_fn_input
from steelyard.spec import title

NUMBERS = ", a number or a list of numbers,"


def check_fields(terms: Terms, file: DataFile, path: str, given: tuple[str, ...]) -> None:
    """Check that every line has the fields that the terms read, as far as they declare them.

    A ready-made term declares them by its options; any other one by an attribute `reads_fields`,
    a list of names.

    Args:
        terms: the base loss and the regularizers; one that may be skipped is not checked.
        file: the lines.
        path: of the file, for the message.
        given: fields that the run adds, such as `reference_logprobs`.

    Raises:
        DataError: a line has no such field, or a term reads pairs and the lines are none.
    """
    for name, fn in terms.required():
        if reads_pairs(fn) and file.kind != "preference":
            raise DataError(
                f"{path} must have pairs for {title(name)}, lines with 'chosen' and 'rejected', "
                f"got lines of the kind {file.kind}."
            )
        for field in fields_read(fn):
            if field not in given:
                lines = zip(file.lines, file.groups, strict=True)
                missing = [n for n, group in lines if loss_fn_input(group[0], field) is None]
                refuse_lines(missing, f"{field!r}{NUMBERS}", title(name), path)


def refuse_lines(missing: Sequence[int], field: str, reader: str, path: str) -> None:
    """Raise if there are lines without a field.

    Args:
        missing: their numbers.
        field: the field, as the message describes it.
        reader: the term or reward that reads it.
        path: of the file.

    Raises:
        DataError: there are.
    """
    if missing:
        more = f" ({len(missing) - 1} more lines lack it.)" if len(missing) > 1 else ""
        raise DataError(
            f"{path}:{missing[0]}: must have the field {field} for {reader}, got none.{more}"
        )


def reads_pairs(fn: Any) -> bool:
    """Whether a term compares neighbouring data: the chosen and the rejected one of a line."""
    return bool(getattr(fn, "reads_pairs", False)) and getattr(fn, "pair", None) is None


def fields_read(fn: Any) -> Iterator[str]:
    """Fields that a term or a reward reads: its `reads_fields`, or its options that name one."""
    declared = getattr(fn, "reads_fields", None)
    if isinstance(declared, (list, tuple)):
        yield from declared
    # The function of a whole-vocabulary term decides whether it reads its reference.
    elif dataclasses.is_dataclass(fn) and not hasattr(fn, "kind"):
        for field in dataclasses.fields(fn):
            value = getattr(fn, field.name)
            if str(field.type).startswith("Source") and isinstance(value, str):
                yield value
