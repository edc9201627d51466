"""What a `training_step` shows of itself from outside, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from steelyard.errors import InputError
from steelyard.gradients import fields_of


def of_batch(batch: object, names: Sequence[str]) -> Mapping[str, Any]:
    """The parts of a batch: its fields; or its items, under `names` or as `batch.0`, `batch.1`.

    Raises:
        InputError: there are more or fewer items than names.
    """
    fields = fields_of(batch)
    if fields is not None:
        return fields
    if not isinstance(batch, tuple | list):
        return {names[0] if names else "batch": batch}
    names = names or getattr(batch, "_fields", [f"batch.{i}" for i in range(len(batch))])
    if len(names) != len(batch):
        raise InputError(
            f"batch must name each item of a batch, got {len(names)} names ({', '.join(names)}) "
            f"for {len(batch)} items."
        )
    return dict(zip(names, batch, strict=True))


def joined(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """All inputs by their name; one that several sources have, as `source.name`."""
    every = {(name, id(value)) for fields in sources.values() for name, value in fields.items()}
    counts = Counter(name for name, _ in every)
    return {
        name if counts[name] == 1 else f"{source}.{name}": value
        for source, fields in sources.items()
        for name, value in fields.items()
    }
