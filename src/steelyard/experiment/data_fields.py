"""Check that lines of data have what the terms read: their fields, and pairs for preferences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from steelyard.errors import DataError
from steelyard.experiment.build_terms import Terms
from steelyard.experiment.data_files import DataFile
from steelyard.gradients import loss_fn_input
from steelyard.spec import BASE, title


def check_fields(terms: Terms, file: DataFile, path: str, given: tuple[str, ...]) -> None:
    """Check that every line has the fields that the ready-made terms read.

    Args:
        terms: the base loss and the regularizers; one that may be skipped is not checked.
        file: the lines.
        path: of the file, for the message.
        given: fields that the run adds, such as `reference_logprobs`.

    Raises:
        DataError: a line has no such field, or a term reads pairs and the lines are none.
    """
    for name, fn in _checked(terms):
        if getattr(fn, "reads_pairs", False) and fn.pair is None and file.kind != "preference":
            raise DataError(
                f"{path} must have pairs for {title(name)}, lines with 'chosen' and 'rejected', "
                f"got lines of the kind {file.kind}."
            )
        for field in _fields_read(fn):
            if field not in given:
                _check_field(name, field, file, path)


def _check_field(name: str, field: str, file: DataFile, path: str) -> None:
    lines = zip(file.lines, file.groups, strict=True)
    missing = [line for line, group in lines if loss_fn_input(group[0], field) is None]
    if missing:
        more = f" ({len(missing) - 1} more lines lack it.)" if len(missing) > 1 else ""
        raise DataError(
            f"{path}:{missing[0]}: must have the field {field!r}, a number or a list of numbers, "
            f"for {title(name)}, got none.{more}"
        )


def _checked(terms: Terms) -> Iterator[tuple[str, Any]]:
    """Name and function of each term that must not fail, and of those that it wraps."""
    specs = [spec for spec in terms.specs if spec.enabled and spec.on_error == "raise"]
    found = [(BASE, terms.loss), *((str(spec.name), spec.fn) for spec in specs)]
    for name, fn in found:
        yield name, fn
        wrapped = getattr(fn, "__dict__", {}).values()  # as of `adaptive`
        yield from ((name, part) for part in wrapped if hasattr(part, "compute"))


def _fields_read(fn: Any) -> list[str]:
    """Fields of a datum that a term reads: its options of the type `Source` that are names."""
    # The function of a whole-vocabulary term decides whether it reads its reference.
    if not dataclasses.is_dataclass(fn) or hasattr(fn, "kind"):
        return []
    sources = (f.name for f in dataclasses.fields(fn) if str(f.type).startswith("Source"))
    return [value for name in sources if isinstance(value := getattr(fn, name), str)]
