"""Which two data belong together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from steelyard.errors import InputError
from steelyard.regularizers._tokens import DatumRow, Source


def pairs_of(rows: Sequence[DatumRow], by: Source | None) -> list[tuple[DatumRow, DatumRow]]:
    """The pairs of a batch, the first of each first: neighbours, or those of one label.

    Raises:
        InputError: a datum has no partner, or more than one.
    """
    if by is None:
        if len(rows) % 2:
            raise InputError(
                f"paired data must come in twos, got {len(rows)} data: datum {len(rows) - 1} has "
                f"no partner."
            )
        return list(zip(rows[::2], rows[1::2], strict=True))
    groups: dict[Hashable, list[DatumRow]] = {}
    for row in rows:
        groups.setdefault(row.read_label(by), []).append(row)
    for label, group in groups.items():
        if len(group) != 2:  # noqa: PLR2004 - a pair
            raise InputError(
                f"a pair must have two data, got the data {[row.index for row in group]} for the "
                f"pair {label!r}."
            )
    return [(first, second) for first, second in groups.values()]
