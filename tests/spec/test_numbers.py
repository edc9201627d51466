from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from steelyard.spec.checks import is_array, is_finite, is_traced, is_whole


@pytest.mark.parametrize("value", [0, -3, 2.5, Fraction(1, 3), np.float32(0.1), np.int64(7), 1e308])
def test_finite_numbers(value: Any) -> None:
    assert is_finite(value)


@pytest.mark.parametrize(
    "value",
    [
        *(True, None, "1", 1j, Decimal(1), np.bool_(True)),
        *(math.nan, math.inf, -math.inf, 10**400, np.nan),
        *(np.ones(1), torch.ones(())),
    ],
)
def test_not_finite_numbers(value: Any) -> None:
    assert not is_finite(value)


@pytest.mark.parametrize(
    ("value", "at_least", "expected"),
    [
        (1, 1, True),
        (0, 1, False),
        (np.int32(5), 5, True),
        (-2, -3, True),
        (True, 0, False),
        (1.0, 0, False),
        ("1", 0, False),
        (None, 0, False),
    ],
)
def test_whole_numbers(value: Any, at_least: int, expected: bool) -> None:
    assert is_whole(value, at_least=at_least) is expected


def test_arrays_are_not_numbers() -> None:
    assert all(is_array(array) for array in (np.ones(2), np.ones(()), torch.ones(()), jnp.ones(())))
    assert not any(is_array(number) for number in (1, 1.0, np.float64(1.0), "shape", None))


def test_a_value_is_traced_inside_jit_and_nowhere_else() -> None:
    seen = []

    @jax.jit
    def note(x: jax.Array) -> jax.Array:
        seen.append(is_traced(x))
        return x

    note(jnp.asarray(1.0))
    assert seen == [True]
    concrete = (jnp.asarray(1.0), torch.tensor(1.0), np.asarray(1.0))
    assert [is_traced(x) for x in concrete] == [False, False, False]


def test_a_fake_tensor_has_no_value_to_read() -> None:
    with torch._subclasses.FakeTensorMode():
        assert is_traced(torch.ones(()))
