from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steelyard.errors import NonFiniteError
from steelyard.gradients.algebra import (
    Row,
    check_gradient,
    differentiate,
    gram,
    norm_of,
    norms_and_cosines,
    split_gradient,
    weighted_sum,
)
from steelyard.gradients.layout import LogProbs, flatten, leaf_over

ZERO = torch.zeros(4)


def compared(
    rows: Mapping[str, Row],
) -> tuple[Mapping[str, float], Mapping[tuple[str, str], float]]:
    return norms_and_cosines(list(rows), gram(list(rows.values())))


def total_of(weights: Sequence[float], *vectors: Tensor) -> Tensor:
    (total,) = weighted_sum(weights, [[vector] for vector in vectors])
    assert total is not None
    return total


# Weighted sums, norms and cosines.


def test_values_by_hand() -> None:
    a, b = torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.tensor([0.0, 5.0, 0.0, 0.0])
    total = total_of([1.0, 2.0], a, b)
    assert total.tolist() == [3.0, 14.0, 0.0, 0.0]
    norms, cosines = compared({"a": [a], "b": [b]})
    assert norms == {"a": 5.0, "b": 5.0}
    assert cosines == {("a", "b"): pytest.approx(0.8)}
    assert norm_of([total]) == pytest.approx(math.hypot(3, 14))
    assert gram([[a], [b]]) == [[25.0, 20.0], [20.0, 25.0]]


def test_no_gradients() -> None:
    assert weighted_sum([], []) == []
    assert gram([]) == []
    assert norms_and_cosines([], []) == ({}, {})
    assert norm_of([None]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_are_left_alone(dtype: torch.dtype) -> None:
    a = torch.ones(4, dtype=dtype)
    assert total_of([2.0, 3.0], a, a).tolist() == [5.0] * 4
    assert a.tolist() == [1.0] * 4


def test_a_zero_gradient_has_cosine_zero() -> None:
    norms, cosines = compared({"a": [ZERO], "b": [torch.ones(4)]})
    assert norms["a"] == 0.0
    assert cosines["a", "b"] == 0.0


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_sizes_whose_squares_float32_cannot_hold(size: float) -> None:
    a, b = torch.tensor([size, 0.0]), torch.tensor([size, size])
    norms, cosines = compared({"a": [a, None], "b": [b, None]})
    assert norms["a"] == pytest.approx(size, rel=1e-6)
    assert cosines["a", "b"] == pytest.approx(math.sqrt(0.5), rel=1e-6)
    assert norm_of([total_of([1.0, 0.0], a, b)]) == pytest.approx(size, rel=1e-6)


def test_nan_is_shown_not_hidden() -> None:
    a, b = torch.tensor([math.nan, 1.0]), torch.ones(2)
    norms, cosines = compared({"a": [a], "b": [b]})
    assert math.isnan(norms["a"])
    assert math.isnan(cosines["a", "b"])
    assert math.isnan(norm_of([total_of([1.0, 1.0], a, b)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_keep_their_dtype(dtype: torch.dtype) -> None:
    a = torch.ones(1000, dtype=dtype)
    total = total_of([0.5], a)
    assert total.dtype == dtype
    assert total[0] == 0.5
    assert norm_of([a]) == pytest.approx(1000**0.5)


vectors = st.lists(st.floats(-10, 10, width=32), min_size=3, max_size=3)


@given(vectors, vectors)
def test_cosines_are_cosines(x: list[float], y: list[float]) -> None:
    a, b = torch.tensor(x), torch.tensor(y)
    _, cosines = compared({"a": [a], "b": [b]})
    assert -1.0 <= cosines["a", "b"] <= 1.0
    expected = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0, eps=0.0)
    if a.norm() > 1e-3 and b.norm() > 1e-3:
        assert cosines["a", "b"] == pytest.approx(expected.item(), abs=1e-5)


def test_many_vectors_are_as_few() -> None:
    torch.manual_seed(0)
    many = {str(i): torch.randn(50) for i in range(20)}
    norms, cosines = compared({name: [vector] for name, vector in many.items()})
    for a, b in (("0", "1"), ("3", "19")):
        few_norms, few_cosines = compared({name: [many[name]] for name in (a, b)})
        assert cosines[a, b] == pytest.approx(few_cosines[a, b], abs=1e-6)
        assert norms[b] == pytest.approx(few_norms[b], rel=1e-6)
    total = total_of([float(i) for i in range(20)], *many.values())
    torch.testing.assert_close(total, sum(i * many[str(i)] for i in range(20)))


# Rows of several entries.

A, B = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])


def test_weighted_sums_entry_by_entry() -> None:
    total, nothing, alone = weighted_sum([2.0, 0.5], [[A, None, None], [A, None, B]])
    assert total is not None
    assert total.tolist() == [7.5, 0.0]
    assert nothing is None
    assert alone is not None
    assert alone.tolist() == [[0.0], [2.0]]
    assert A.tolist() == [3.0, 0.0]


def test_a_missing_entry_is_zero() -> None:
    norms, cosines = compared({"one": [A, B], "two": [A, None], "three": [None, None]})
    assert norms == {"one": 5.0, "two": 3.0, "three": 0.0}
    assert cosines["one", "two"] == pytest.approx(9 / 15)
    assert cosines["one", "three"] == 0.0


def test_scalars_and_tensors_of_any_dtype_in_one_row() -> None:
    scalar, half = torch.tensor(2.0), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    rows: list[Row] = [[scalar, half, A], [scalar, None, A]]
    assert gram(rows) == [[4.0 + 5.0 + 9.0, 4.0 + 9.0], [4.0 + 9.0, 4.0 + 9.0]]
    total = weighted_sum([1.0, 3.0], rows)
    assert [t.tolist() for t in total if t is not None] == [8.0, [1.0, 2.0], [12.0, 0.0]]


def test_half_precision_is_summed_in_float32_and_double_in_double() -> None:
    half = torch.full((4096,), 0.1, dtype=torch.bfloat16)
    exact = math.sqrt(4096) * half[0].item()
    assert norm_of([half]) == pytest.approx(exact, rel=1e-6)
    double = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    other = torch.tensor([0.0, 1.0], dtype=torch.float64)
    _, cosines = compared({"a": [double], "b": [other]})
    assert cosines["a", "b"] == pytest.approx(1e-9)


# Derivatives.


def leaf_and_views(*rows: list[float]) -> tuple[Tensor, LogProbs]:
    layout, flat = flatten([torch.tensor(row) for row in rows])
    leaf = leaf_over(flat)
    return leaf, layout.split(leaf)


def test_the_gradient_is_one_vector() -> None:
    leaf, views = leaf_and_views([1.0, 2.0], [3.0])
    (gradient,) = differentiate(views[0].square().sum() + 5 * views[1].sum(), [leaf])
    assert gradient is not None
    assert gradient.tolist() == [2.0, 4.0, 5.0]


def test_a_datum_that_is_not_used_has_a_zero_gradient() -> None:
    leaf, views = leaf_and_views([1.0, 2.0], [3.0])
    (gradient,) = differentiate(views[1].sum(), [leaf])
    assert gradient is not None
    assert gradient.tolist() == [0.0, 0.0, 1.0]


def test_no_path_no_gradient() -> None:
    leaf, _ = leaf_and_views([1.0])
    assert differentiate(torch.tensor(1.0), [leaf])[0] is None
    other = torch.tensor(1.0, requires_grad=True)
    assert differentiate(other * 2, [leaf])[0] is None
    assert list(differentiate(other * 2, [A, B])) == [None, None]


def test_a_constant_among_the_inputs_has_no_gradient() -> None:
    leaf, views = leaf_and_views([1.0, 2.0])
    other = torch.tensor(4.0, requires_grad=True)
    first, none, last = differentiate(other * views[0].sum(), [other, A, leaf])
    assert none is None
    assert first is not None
    assert last is not None
    assert (first.item(), last.tolist()) == (3.0, [4.0, 4.0])


def test_terms_may_share_a_part_of_the_graph() -> None:
    leaf, views = leaf_and_views([1.0, 2.0])
    shared = views[0].exp()
    assert differentiate(shared.sum(), [leaf])[0] is not None
    assert differentiate(shared.prod(), [leaf])[0] is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_works_where_the_caller_has_switched_gradients_off(mode: type) -> None:
    def gradient() -> Tensor | None:
        layout, flat = flatten([torch.tensor([1.0, 2.0])])
        leaf = leaf_over(flat)
        with torch.inference_mode(mode=False), torch.enable_grad():
            return differentiate(layout.split(leaf)[0].square().sum(), [leaf])[0]

    with mode():
        found = gradient()
    assert found is not None
    assert found.tolist() == [2.0, 4.0]


def test_a_gradient_divides_into_the_leaf_and_the_needs() -> None:
    leaf, views = leaf_and_views([1.0, 2.0])
    x, y = A.clone().requires_grad_(), B.clone().requires_grad_()
    extra = {"logits": [x], "parameters": {"a": y, "b": x}}
    gradient, by_need = split_gradient(2 * x.sum() + views[0].sum(), leaf, extra)
    assert gradient is not None
    assert gradient.tolist() == [1.0, 1.0]
    found = {k: [g if g is None else g.tolist() for g in row] for k, row in by_need.items()}
    assert found["logits"] == [[2.0, 2.0]]
    assert found["parameters"][0] is None
    assert split_gradient(views[0].sum(), leaf, extra)[1] == {}
    assert split_gradient(x.sum(), leaf, {}) == (None, {})


def test_a_gradient_that_is_not_finite() -> None:
    check_gradient("t", [torch.tensor([1e38, 1e38]), None])
    with pytest.raises(NonFiniteError, match="the gradient of regularizer 't'") as caught:
        check_gradient("t", [None, torch.tensor([math.inf, math.nan])])
    assert caught.value.kind == "nan"
    with pytest.raises(NonFiniteError) as caught:
        check_gradient("t", [torch.tensor([1.0]), torch.tensor([1.0, -math.inf])])
    assert caught.value.kind == "inf"
