"""Name the fields of a batch, and of what `training_step` returns, as inputs of terms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from steelyard.errors import InputError
from steelyard.gradients import fields_of


def batch_fields(batch: object, names: Sequence[str]) -> Mapping[str, Any]:
    """Fields of a batch, by name.

    The items of a tuple are called by `names`, or else `batch.0`, `batch.1`, …; a single tensor
    is called by the only one of `names`, or else `batch`.

    Raises:
        InputError: there are more or fewer items than names.
    """
    fields = fields_of(batch)
    if fields is not None:
        return fields
    if not isinstance(batch, tuple | list):
        batch, names = (batch,), names or ("batch",)
    names = names or getattr(batch, "_fields", [f"batch.{i}" for i in range(len(batch))])
    if len(names) != len(batch):
        raise InputError(
            f"batch must name each item of a batch, got {len(names)} names ({', '.join(names)}) "
            f"for {len(batch)} items."
        )
    return dict(zip(names, batch, strict=True))


def merge_sources(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the fields of all sources; a name with two different values becomes `source.name`."""
    distinct = {(name, id(value)) for fields in sources.values() for name, value in fields.items()}
    counts = Counter(name for name, _ in distinct)
    return {
        name if counts[name] == 1 else f"{source}.{name}": value
        for source, fields in sources.items()
        for name, value in fields.items()
    }
