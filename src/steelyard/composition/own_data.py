"""Data of a term's own: drawn for each call, run beside the batch, and read by that term alone.

The model runs once over the batch and, behind it, the data of each such term:

    data of a call:  batch | data of term a | data of term b

The base loss and the other terms see the batch; a term with data of its own sees these alone. Which
of its data a call has follows from the seed, the step, the call within the step, the rank and the
name of the term: n of them are the next n of a permutation, a new one for each pass over all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from steelyard.errors import InputError
from steelyard.spec.error_messages import title
from steelyard.spec.regularizer import RegularizerSpec

T = TypeVar("T")


@dataclass(frozen=True)
class JoinedData:
    """The data of a call: the batch, and the data of its terms' own; see `Pipeline.join`.

    Attributes:
        batch: what the base loss and the other terms read.
        own: by the name of the term.

    Example:
        >>> joined = JoinedData(["a", "b"], {"keep": ["c"]})
        >>> joined.data
        ['a', 'b', 'c']
        >>> joined.split([1, 2, 3])
        ([1, 2], {'keep': [3]})
    """

    batch: Sequence[Any]
    own: Mapping[str, Sequence[Any]]

    @cached_property
    def data(self) -> list[Any]:
        """All of them, the batch first: what to run the model on."""
        return [*self.batch, *(datum for data in self.own.values() for datum in data)]

    def __len__(self) -> int:
        return len(self.data)

    def data_of(self, term: str) -> Sequence[Any]:
        """The data that a term reads."""
        return self.own.get(term, self.batch)

    def slice_of(self, term: str) -> slice:
        """The place in `data` of those that a term reads."""
        end = len(self.batch)
        for name, data in self.own.items():
            start, end = end, end + len(data)
            if name == term:
                return slice(start, end)
        return slice(0, len(self.batch))

    def split(self, items: Sequence[T]) -> tuple[list[T], dict[str, list[T]]]:
        """Divide a list with one item for each of `data`: those of the batch, and of each term."""
        return (
            list(items[: len(self.batch)]),
            {name: list(items[self.slice_of(name)]) for name in self.own},
        )

    def split_inputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The named inputs of the batch, and those of each term with data of its own.

        A list with one item for each of `data` is divided, any other input is the same for all.

        Raises:
            InputError: `"logprobs"` is no such list.
        """
        logprobs = inputs["logprobs"]
        if not isinstance(logprobs, list | tuple) or len(logprobs) != len(self):
            count = len(logprobs) if isinstance(logprobs, list | tuple) else "one tensor"
            raise InputError(
                f"logprobs must be a list with one tensor for each of the {len(self)} data of "
                f"joined.data, which holds the batch and the data of terms' own, got {count}."
            )
        of_batch: dict[str, Any] = {}
        of_terms: dict[str, dict[str, Any]] = {name: {} for name in self.own}
        for key, items in inputs.items():
            own: Mapping[str, Any]
            if key == "data":
                of_batch[key], own = self.batch, self.own
            elif isinstance(items, list | tuple) and len(items) == len(self):
                of_batch[key], own = self.split(items)
            else:
                of_batch[key], own = items, dict.fromkeys(self.own, items)
            for name, items_of_term in own.items():
                of_terms[name][key] = items_of_term
        return of_batch, of_terms


@dataclass(frozen=True)
class SeparateInputs(JoinedData):
    """Data of a call whose terms' own data have passes of their own through the model.

    Attributes:
        inputs: the named inputs of each term with data of its own, by its name.
    """

    inputs: Mapping[str, Mapping[str, Any]]

    def split_inputs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """The named inputs of the batch, and those of each term with data of its own."""
        return {**inputs, "data": self.batch}, {
            name: dict(of_term) for name, of_term in self.inputs.items()
        }


def inputs_of(inputs: Mapping[str, Any], term: str) -> Mapping[str, Any]:
    """The named inputs of a call among which a term finds those that it reads."""
    data = inputs.get("data")
    return data.inputs.get(term, inputs) if isinstance(data, SeparateInputs) else inputs


def data_of(data: Any, term: str) -> Any:
    """The data that a term reads in a call: its own, or the batch."""
    return data.data_of(term) if isinstance(data, JoinedData) else data


def batch_of(data: Any) -> Any:
    """The data that the base loss reads in a call."""
    return data.batch if isinstance(data, JoinedData) else data


def check_joined(specs: Iterable[RegularizerSpec], data: Any) -> None:
    """Check that the data of a call hold those of each term with data of its own.

    Raises:
        InputError: they do not.
    """
    for spec in specs:
        if spec.data is not None and not (isinstance(data, JoinedData) and spec.name in data.own):
            raise InputError(
                f"{title(spec.name)} reads data of its own, and the call has the batch alone: run "
                f"the model on joined.data, with joined = join(data), and pass joined as the data."
            )


def indices_of_call(call: int, size: int, count: int, seed: Sequence[int]) -> list[int]:
    """Indices of the data of one call, `size` out of `count`; all of them if there are no more.

    Each pass over the data has its own permutation; a call may end one pass and begin the next.

    Args:
        call: the number of the call, from 0.
        size: number of data of a call.
        count: number of all data.
        seed: of the permutations.

    Example:
        >>> [indices_of_call(call, size=2, count=4, seed=[0]) for call in range(3)]
        [[2, 0], [1, 3], [3, 0]]
    """
    if size >= count:
        return list(range(count))
    # Position p of the endless sequence is entry p mod count of pass p // count.
    places = range(call * size, (call + 1) * size)
    orders = {
        number: np.random.default_rng([*seed, number]).permutation(count).tolist()
        for number in {place // count for place in places}
    }
    return [orders[place // count][place % count] for place in places]
