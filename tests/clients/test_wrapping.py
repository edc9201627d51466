"""`regularize` itself: what it wraps, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalTrainingClient
from steelyard.errors import InputError, SpecError


def total(_: Any, logprobs: list[Tensor]) -> Tensor:
    return logprobs[0].sum()


SPEC = RegularizerSpec(total, 0.1, "total")


def test_a_wrapped_client_is_returned_as_it_is(local: LocalTrainingClient) -> None:
    client = regularize(local, [SPEC])
    assert regularize(client) is client
    assert client.client is local
    assert client.regularizers == (SPEC,)


def test_a_wrapped_client_takes_no_more_terms(local: LocalTrainingClient) -> None:
    client = regularize(local)
    with pytest.raises(SpecError) as caught:
        regularize(client, [SPEC])
    assert str(caught.value) == (
        "client must be a plain client if there are regularizers or settings, got a wrapped one "
        "and 'regularizers': give them all in one call of regularize."
    )


def test_a_wrapped_client_takes_no_other_settings(local: LocalTrainingClient) -> None:
    client = regularize(local, [SPEC])
    assert regularize(client, aggregate="sum") is client
    with pytest.raises(SpecError, match="a wrapped one and 'timeout', 'aggregate': give them all"):
        regularize(client, timeout=5.0, aggregate="upgrad")


def test_a_client_without_the_two_methods_is_refused() -> None:
    with pytest.raises(InputError, match="str has no forward and no forward_backward"):
        regularize("client", [SPEC])


def test_mappings_and_iterators_are_accepted(local: LocalTrainingClient) -> None:
    terms: Iterator[Any] = iter([{"fn": total, "weight": 0.5, "name": "a"}, SPEC])
    client = regularize(local, terms)
    assert [(each.name, each.weight) for each in client.regularizers] == [
        ("a", 0.5),
        ("total", 0.1),
    ]
