"""Masks and reductions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from steelyard import penalties
from steelyard.errors import InputError
from steelyard.penalties._arrays import namespace
from steelyard.penalties._reduction import accept_mask, accept_reduction, count, keep, reduce

from .backends import Backend
from .every_penalty import MASKED, call


@pytest.mark.parametrize("fn", MASKED)
def test_masks_are_boolean_and_broadcast(backend: Backend, fn: Any) -> None:
    x = backend.array(np.zeros((4, 2, 3)))
    with pytest.raises(InputError, match="mask must hold booleans, got float64; compare first"):
        call(fn, x, mask=backend.array([1.0, 0.0]))
    rows = fn in (penalties.entropy, penalties.kl_divergence, penalties.js_divergence)
    target = r"\(4, 2\)" if rows else r"\(4, 2, 3\)"
    for shape in [(5,), (4, 2, 3, 1)]:
        with pytest.raises(InputError, match=rf"mask must broadcast to {target} .* got shape"):
            call(fn, x, mask=backend.mask(np.ones(shape)))
    for thing in (True, [True]):
        with pytest.raises(InputError, match="mask must be NumPy, torch or JAX arrays"):
            call(fn, x, mask=thing)


def test_masks_of_every_broadcast(backend: Backend) -> None:
    x = backend.array(np.arange(6.0).reshape(2, 3))
    for mask, expected in [
        (True, 15),
        ([True, False, True], 0 + 2 + 3 + 5),
        ([[True], [False]], 3),
        ([[False, True, False]], 1 + 4),
    ]:
        assert backend.numpy(penalties.l1(x, mask=backend.mask(mask))) == expected


def test_a_mean_over_more_than_float32_can_count(backend: Backend) -> None:
    """2**24 + 1 is not a float32; a count summed in float32 would stop there."""
    size = 2**24 + 3
    x = backend.array(np.ones(size, np.float32), "float32")
    assert backend.numpy(penalties.l1(x, reduction="mean", mask=x > 0)) == 1.0


def test_a_mask_takes_the_shape_of_what_it_selects(backend: Backend) -> None:
    x = backend.array(np.zeros((2, 3, 4)))
    xp = namespace(x=x)
    assert accept_mask(xp, None, x, None) is None
    cases: list[tuple[int | None, tuple[int, ...], Any]] = [
        (None, (2, 3, 4), [True, False, True, True]),
        (2, (2, 3), [[True], [False]]),
        (1, (2, 4), True),
        (0, (3, 4), [[False], [True], [True]]),
    ]
    for axis, shape, mask in cases:
        full: Any = accept_mask(xp, backend.mask(mask), x, axis)
        assert tuple(full.shape) == shape
        np.testing.assert_array_equal(backend.numpy(full), np.broadcast_to(mask, shape))


def test_masked_elements_are_replaced_before_the_formula(backend: Backend) -> None:
    x = backend.array([[1.0, math.nan], [2.0, 3.0]])
    xp = namespace(x=x)
    assert keep(xp, x, None) is x
    by_element = keep(xp, x, backend.mask([[True, False], [True, True]]))
    np.testing.assert_array_equal(backend.numpy(by_element), [[1, 0], [2, 3]])
    by_row = keep(xp, x, backend.mask([False, True]), axis=1)
    np.testing.assert_array_equal(backend.numpy(by_row), [[0, 0], [2, 3]])
    by_column = keep(xp, x, backend.mask([True, False]), axis=0)
    np.testing.assert_array_equal(backend.numpy(by_column), [[1, 0], [2, 0]])


@pytest.mark.parametrize(
    ("mask", "expected", "number"),
    [
        (None, {"sum": 10.0, "mean": 2.5, "none": [1, 2, 3, 4]}, 4),
        ([True, False, True, False], {"sum": 4.0, "mean": 2.0, "none": [1, 0, 3, 0]}, 2),
        ([False] * 4, {"sum": 0.0, "mean": 0.0, "none": [0, 0, 0, 0]}, 1),
    ],
)
def test_reductions_by_hand(
    backend: Backend, mask: Any, expected: dict[str, Any], number: int
) -> None:
    x = backend.array([1.0, 2.0, 3.0, 4.0])
    xp = namespace(x=x)
    selected = None if mask is None else backend.mask(mask)
    for reduction, value in expected.items():
        found = reduce(xp, x, reduction, selected)
        np.testing.assert_array_equal(backend.numpy(found), value)
    assert float(count(xp, x, selected)) == number


def test_the_mean_of_an_empty_array_is_zero(backend: Backend) -> None:
    x = backend.array(np.zeros((0, 3)))
    assert backend.numpy(reduce(namespace(x=x), x, "mean")) == 0


def test_allowed_reductions() -> None:
    assert accept_reduction("none") == "none"
    with pytest.raises(InputError, match="reduction must be one of 'mean', 'sum', got 'none'"):
        accept_reduction("none", ("mean", "sum"))
