"""Names of the inputs that the terms of a trainer read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from steelyard.composition import Reads
from steelyard.errors import InputError
from steelyard.integrations.huggingface.duplicate_terms import reads_reference_of_data
from steelyard.spec import RegularizerSpec


class InputNames(NamedTuple):
    """Inputs that terms read, without what follows a dot.

    Attributes:
        required: required inputs, and the name of a term that reads each.
        all: all inputs, also those that a term can do without.
    """

    required: Mapping[str, str]
    all: set[str]


def input_names(specs: Sequence[RegularizerSpec]) -> InputNames:
    """Collect the names of all inputs that terms read.

    Raises:
        InputError: a term over `(data, logprobs)` needs a projection for each datum.
    """
    required: dict[str, str] = {}
    optional: set[str] = set()
    for spec in specs:
        fn = spec.fn
        read = fn.required if isinstance(fn, Reads) else ("data", "logprobs")
        if reads_reference_of_data(spec):
            read = (*read, "reference_logprobs")
        required |= {name.partition(".")[0]: spec.name for name in (*read, *spec.needs)}
        optional |= set(fn.optional) if isinstance(fn, Reads) else set()
        if "projection" in spec.needs:
            raise InputError(
                f"a term that needs a projection for each datum must run on steelyard.engine; "
                f"here read that of the batch, term(..., inputs='projection') "
                f"(regularizer {spec.name!r})."
            )
    return InputNames(required, required.keys() | optional)
