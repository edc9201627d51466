from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.gradients import combine

LIKE = torch.zeros(4)


def test_values_by_hand() -> None:
    a, b = torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.tensor([0.0, 5.0, 0.0, 0.0])
    pull = combine({"a": a, "b": b}, {"a": 1.0, "b": 2.0}, LIKE, tracked=True)
    assert pull.total.tolist() == [3.0, 14.0, 0.0, 0.0]
    assert pull.norms == {"a": 5.0, "b": 5.0}
    assert pull.cosines == {("a", "b"): pytest.approx(0.8)}
    assert pull.total_norm == pytest.approx(math.hypot(3, 14))


def test_untracked_gives_the_same_total_and_nothing_else() -> None:
    vectors = {name: torch.randn(4) for name in "abc"}
    weights = {"a": 1.0, "b": 0.5, "c": 0.0}
    tracked = combine(vectors, weights, LIKE, tracked=True)
    plain = combine(vectors, weights, LIKE, tracked=False)
    torch.testing.assert_close(plain.total, tracked.total)
    assert plain.total_norm == pytest.approx(tracked.total_norm)
    assert (plain.norms, plain.cosines) == ({}, {})


def test_no_gradients() -> None:
    pull = combine({}, {}, torch.ones(3), tracked=True)
    assert pull.total.tolist() == [0.0, 0.0, 0.0]
    assert pull.total_norm == 0.0


def test_the_gradients_are_left_alone() -> None:
    a = torch.ones(4)
    combine({"a": a, "b": a}, {"a": 2.0, "b": 3.0}, LIKE, tracked=False)
    assert a.tolist() == [1.0] * 4


def test_a_zero_gradient_has_cosine_zero() -> None:
    pull = combine({"a": LIKE, "b": torch.ones(4)}, {"a": 1.0, "b": 1.0}, LIKE, tracked=True)
    assert pull.norms["a"] == 0.0
    assert pull.cosines["a", "b"] == 0.0


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_sizes_whose_squares_float32_cannot_hold(size: float) -> None:
    a, b = torch.tensor([size, 0.0]), torch.tensor([size, size])
    pull = combine({"a": a, "b": b}, {"a": 1.0, "b": 0.0}, LIKE, tracked=True)
    assert pull.norms["a"] == pytest.approx(size, rel=1e-6)
    assert pull.cosines["a", "b"] == pytest.approx(math.sqrt(0.5), rel=1e-6)
    assert pull.total_norm == pytest.approx(size, rel=1e-6)


def test_nan_is_shown_not_hidden() -> None:
    a = torch.tensor([math.nan, 1.0])
    pull = combine({"a": a, "b": torch.ones(2)}, {"a": 1.0, "b": 1.0}, a, tracked=True)
    assert math.isnan(pull.norms["a"])
    assert math.isnan(pull.cosines["a", "b"])
    assert math.isnan(pull.total_norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_keep_their_dtype(dtype: torch.dtype) -> None:
    a = torch.ones(1000, dtype=dtype)
    for tracked in (True, False):
        pull = combine({"a": a}, {"a": 0.5}, a, tracked=tracked)
        assert pull.total.dtype == dtype
        assert pull.total[0] == 0.5
    assert combine({"a": a}, {"a": 1.0}, a, tracked=True).norms["a"] == pytest.approx(1000**0.5)


vectors = st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3)


@given(vectors, vectors)
def test_cosines_are_cosines(x: list[float], y: list[float]) -> None:
    a, b = torch.tensor(x), torch.tensor(y)
    pull = combine({"a": a, "b": b}, {"a": 1.0, "b": 1.0}, a, tracked=True)
    assert -1.0 <= pull.cosines["a", "b"] <= 1.0
    expected = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0, eps=0.0)
    if a.norm() > 1e-3 and b.norm() > 1e-3:
        assert pull.cosines["a", "b"] == pytest.approx(expected.item(), abs=1e-5)


def test_many_vectors_are_as_few() -> None:
    torch.manual_seed(0)
    vectors = {str(i): torch.randn(50) for i in range(20)}
    weights = {str(i): float(i) for i in range(20)}
    pull = combine(vectors, weights, LIKE, tracked=True)
    for a, b in (("0", "1"), ("3", "19")):
        pair = {name: vectors[name] for name in (a, b)}
        few = combine(pair, weights, LIKE, tracked=True)
        assert pull.cosines[a, b] == pytest.approx(few.cosines[a, b], abs=1e-6)
        assert pull.norms[b] == pytest.approx(few.norms[b], rel=1e-6)
    expected = sum(i * vectors[str(i)] for i in range(20))
    torch.testing.assert_close(pull.total, expected)
