from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
import pytest

from steelyard.errors import InputError, NonFiniteError
from steelyard.penalties import validate

from .backends import JAX, Backend

DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_arrays_are_returned_unchanged(backend: Backend, dtype: str) -> None:
    for values in ([[1.0, -2.0]], [], 3.0):
        x = backend.array(np.asarray(values, dtype=np.float64), dtype)
        assert validate(x) is x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([[1.0, np.inf], [np.nan, np.nan]], "nan", "nan in 2 of 4 values, first at index (1, 0)"),
        ([1.0, -np.inf, np.inf], "inf", "inf in 2 of 3 values, first at index (1,)"),
        (np.nan, "nan", "nan in 1 of 1 values, first at index ()"),
    ],
)
def test_nan_is_reported_before_inf(
    backend: Backend, dtype: str, values: Any, kind: str, message: str
) -> None:
    with pytest.raises(NonFiniteError) as caught:
        validate(backend.array(values, dtype))
    assert caught.value.kind == kind
    assert str(caught.value).startswith(f"x must be finite, got {message}")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.kind, str(again)) == (kind, str(caught.value))


def test_traced_arrays_are_an_error() -> None:
    with pytest.raises(InputError, match=r"traced array; call validate outside jax.jit"):
        jax.jit(validate)(JAX.array([1.0]))
