"""Look up the named inputs of a composite call in mappings, dataclasses and heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from steelyard.errors import InputError
from steelyard.gradients import fields_of

# Tensors as a rule, and any other object that a term reads.
NamedInputs: TypeAlias = Mapping[str, Any]


def gather(outputs: Sequence[object], inputs: NamedInputs) -> dict[str, Any]:
    """Merge the arguments of a call into one mapping: fields of each output, then keywords.

    Raises:
        InputError: an output has no names, or a name stands twice.
    """
    found: dict[str, Any] = {}
    for output in (*outputs, inputs):
        fields = fields_of(output)
        if fields is None:
            raise InputError(
                f"an output must be a mapping or a dataclass, which give names to what they hold, "
                f"got {type(output).__name__}: pass it by name, for example logits=...."
            )
        for name, value in fields.items():
            if name in found and found[name] is not value:
                raise InputError(f"an input must stand once, and {name!r} came twice.")
            found[name] = value
    return found


def within(inputs: NamedInputs, head: str) -> dict[str, Any]:
    """Inputs visible to the terms of a head: its own, and those that all heads share.

    A mapping or dataclass with an entry for the head gives that entry, so that both
    `{"value": {"logits": ...}}` and `{"logits": {"value": ...}}` are read as `logits`.
    """
    seen = {}
    for name, value in inputs.items():
        fields = fields_of(value)
        seen[name] = value if fields is None else fields.get(head, value)
    return {**seen, **(fields_of(inputs.get(head)) or {})}


def find(inputs: NamedInputs, name: str) -> Any:
    """Find an input by name; dots lead into mappings and dataclasses.

    Raises:
        KeyError: it is not there.
    """
    if name in inputs:
        return inputs[name]
    for at, letter in enumerate(name):
        inner = fields_of(inputs.get(name[:at])) if letter == "." else None
        if inner is not None:
            return find(inner, name[at + 1 :])
    raise KeyError(name)


def names_in(inputs: NamedInputs, prefix: str = "") -> Iterator[str]:
    """All names that `find` accepts, for error messages."""
    for name, value in inputs.items():
        fields = fields_of(value)
        if fields:
            yield from names_in(fields, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
