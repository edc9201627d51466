"""Masks, fields, pairs and the tail: what all regularizers read in one way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InputError
from steelyard.regularizers import (
    DPO,
    L1,
    L2,
    ChosenNLL,
    ConfidencePenalty,
    Consistency,
    DemographicParity,
    ElasticNet,
    EMADrift,
    Entropy,
    JSToReference,
    KLToReference,
    SquaredLogRatio,
    TopologicalConsistency,
)
from steelyard.regularizers._pairs import pairs_of
from steelyard.regularizers._tail import FLOOR, with_tail
from steelyard.regularizers._tokens import mean, rows_of

from .checks import doubles, plain, slopes, tinkered, value_and_gradients

LOGPROBS = doubles([-0.5, -1.5, -2.5], [-1.0, -0.2])
REFERENCE = [[-0.7, -1.0, -2.0], [-1.3, -0.4]]

TERMS: list[Any] = [
    L1(),
    L2(),
    ElasticNet(),
    Entropy(),
    Entropy(mode="bonus"),
    ConfidencePenalty(threshold=3.0),
    KLToReference(),
    KLToReference(estimator="k3"),
    JSToReference(),
    Consistency(level="sequence"),
    DPO(),
    ChosenNLL(),
    SquaredLogRatio(),
    DemographicParity(test="none"),
    TopologicalConsistency(points=lambda datum, lp: lp[:, None], dimensions=0),
]


def batch(make: Any, padding: float | None = None) -> tuple[list[Any], list[torch.Tensor]]:
    """Two data; with padding, one more token in each, of weight 0 and that log-prob."""
    more = [] if padding is None else [padding]
    zeros = [] if padding is None else [0.0]
    data = [
        make(
            weights=[*(1.0 for _ in reference), *zeros],
            reference_logprobs=[*reference, *more],
            group=[index],
        )
        for index, reference in enumerate(REFERENCE)
    ]
    return data, [torch.cat([row, torch.tensor(more, dtype=row.dtype)]) for row in LOGPROBS]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
@pytest.mark.parametrize("make", [plain, tinkered])
@pytest.mark.parametrize("padding", [-7.0, math.nan, -math.inf])
def test_tokens_of_weight_zero_are_as_if_they_were_not_there(
    term: Any, make: Any, padding: float
) -> None:
    value, gradients = value_and_gradients(term, *batch(make))
    padded_value, padded = value_and_gradients(term, *batch(make, padding))
    assert padded_value == pytest.approx(value, rel=1e-12)
    for own, longer in zip(gradients, padded, strict=True):
        torch.testing.assert_close(longer[:-1], own, rtol=1e-6, atol=0)
        assert longer[-1] == 0
    assert any(own.abs().sum() > 0 for own in gradients)


@pytest.mark.parametrize("term", [*TERMS, EMADrift()], ids=lambda term: term.name)
def test_nothing_that_counts_costs_nothing_and_has_no_gradient(term: Any) -> None:
    data, logprobs = batch(plain)
    for datum in data:
        datum["loss_fn_inputs"]["weights"] = np.zeros(len(datum["loss_fn_inputs"]["weights"]))
    value, gradients = value_and_gradients(term, data, logprobs)
    expected = {"dpo": math.log(2), "confidence_penalty": 3.0}.get(term.name, 0.0)
    assert value == pytest.approx(expected)
    assert all(bool((own == 0).all()) for own in gradients)


@pytest.mark.parametrize(
    "term",
    [L1(), Entropy(), KLToReference(), DemographicParity(test="none")],
    ids=lambda term: term.name,
)
def test_weights_that_do_not_fit_name_their_datum(term: Any) -> None:
    data, logprobs = batch(plain)
    data[1]["loss_fn_inputs"]["weights"] = [1.0]
    with pytest.raises(InputError) as caught:
        term.compute(data, logprobs)
    assert str(caught.value) == "weights of datum 1 must have one number per token, [2], got [1]."


@pytest.mark.parametrize(
    ("term", "field"),
    [
        (KLToReference(), "reference_logprobs"),
        (JSToReference(reference="teacher"), "teacher"),
        (DPO(), "reference_logprobs"),
        (SquaredLogRatio(), "reference_logprobs"),
        (DemographicParity(test="none"), "group"),
        (Consistency(pair="pair"), "pair"),
    ],
)
@pytest.mark.parametrize("make", [plain, tinkered])
def test_a_missing_field_names_datum_and_field(term: Any, field: str, make: Any) -> None:
    fields = {field: REFERENCE[0] if "group" != field != "pair" else [0]}
    data = [make(**fields), make(other=[0])]
    with pytest.raises(InputError) as caught:
        term.compute(data, LOGPROBS)
    assert str(caught.value) == (
        f"datum 1 must have the field {field!r} in its loss_fn_inputs, got none."
    )


def test_without_data_a_field_is_missing_from_the_first() -> None:
    with pytest.raises(InputError, match="datum 0 must have the field 'reference_logprobs'"):
        KLToReference().compute([], LOGPROBS)


def test_a_function_may_give_what_a_field_does() -> None:
    term = KLToReference(reference=lambda datum, index: REFERENCE[index])
    expected = KLToReference().compute(*batch(plain))
    assert term.compute([None, None], LOGPROBS) == expected


def test_a_function_that_gives_nothing_is_named() -> None:
    def teacher(datum: Any, index: int) -> Any:
        return REFERENCE[index] if index == 0 else None

    with pytest.raises(InputError) as caught:
        KLToReference(reference=teacher).compute([None, None], LOGPROBS)
    assert str(caught.value) == "datum 1 must have a value from teacher, got none."


def test_a_field_of_another_shape_names_its_datum() -> None:
    data, logprobs = batch(plain)
    data[1]["loss_fn_inputs"]["reference_logprobs"] = [[-1.0, -2.0]]
    with pytest.raises(InputError) as caught:
        KLToReference().compute(data, logprobs)
    assert str(caught.value) == (
        "reference_logprobs of datum 1 must have the shape of its log-probs, [2], got [1, 2]."
    )


def test_as_many_data_as_log_probs() -> None:
    with pytest.raises(InputError, match="as many data as log-probs, got 1 and 2"):
        L1().compute([{}], LOGPROBS)


def test_one_tensor_is_one_datum() -> None:
    data = [plain(weights=[1.0, 0.0])]
    assert L1().compute(data, torch.tensor([-1.0, -5.0])) == 1.0


@pytest.mark.parametrize(
    ("term", "shapes", "message"),
    [
        (Entropy(), [(2,), (2, 3)], "datum 1 must have the shape [T] or [T, K], the same"),
        (L1(), [(2, 3, 4)], "datum 0 must have the shape [T] or [T, K], the same"),
        (DPO(), [(2,), (2, 3)], "datum 1 must have the shape [T], got [2, 3]"),
        (DemographicParity(test="none"), [(2, 3)], "datum 0 must have the shape [T], got [2, 3]"),
    ],
)
def test_log_probs_of_another_shape(term: Any, shapes: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        term.compute([], [torch.zeros(*shape) for shape in shapes])
    assert message in str(caught.value)


def test_a_row_of_classes_counts_if_one_class_does() -> None:
    data = [plain(weights=[[0.0, 1.0], [0.0, 0.0]])]
    (row,) = rows_of(data, [torch.zeros(2, 2)], classes=True)
    assert row.mask is not None
    assert row.mask.tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "label"),
    [(1, 1), ([2], 2), (torch.tensor([3.0]), 3), (np.array(0.5), 0.5), ("north", "north")],
)
def test_labels(value: Any, label: Any) -> None:
    (row,) = rows_of([plain(group=value)], [torch.zeros(1)])
    assert row.read_label("group") == label


def test_several_labels_are_none() -> None:
    (row,) = rows_of([plain(group=[1, 2])], [torch.zeros(1)])
    with pytest.raises(
        InputError, match=r"group of datum 0 must be one label, got the shape \[2\]"
    ):
        row.read_label("group")


def test_pairs_by_label_keep_their_order() -> None:
    rows = rows_of([plain(pair=label) for label in (7, 3, 3, 7)], [torch.zeros(1)] * 4)
    found = [(a.index, b.index) for a, b in pairs_of(rows, "pair")]
    assert found == [(0, 3), (1, 2)]


def test_a_datum_without_a_partner() -> None:
    rows = rows_of([plain(pair=label) for label in (7, 3, 7)], [torch.zeros(1)] * 3)
    with pytest.raises(InputError) as caught:
        pairs_of(rows, "pair")
    assert str(caught.value) == "a pair must have two data, got the data [1] for the pair 3."
    with pytest.raises(InputError) as caught:
        pairs_of(rows, None)
    assert str(caught.value) == (
        "paired data must come in twos, got 3 data: datum 2 has no partner."
    )


def test_the_mean_of_nothing_is_zero() -> None:
    assert mean(torch.zeros(0)) == 0
    assert mean(torch.tensor([1.0, 3.0])) == 2


@given(st.lists(st.floats(-8, 0), min_size=1, max_size=5), st.floats(0.01, 0.99))
def test_the_classes_and_their_tail_are_a_distribution(logits: list[float], mass: float) -> None:
    listed = torch.tensor([logits], dtype=torch.float64).log_softmax(-1) + math.log(mass)
    whole = with_tail(listed)
    assert torch.equal(whole[:, :-1], listed)
    assert whole.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert whole[0, -1].item() == pytest.approx(math.log1p(-mass), rel=1e-9)


def test_the_gradient_flows_through_the_tail() -> None:
    (listed,) = doubles([[-1.0, -2.0]])
    leaf = listed.clone().requires_grad_()
    with_tail(leaf)[0, -1].backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    (expected,) = slopes(lambda lp: math.log(1 - lp[0].exp().sum().item()), [listed])
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "row", [[0.0], [-math.log(2)] * 2, [0.0, -math.inf], [-1e-9], [0.1], [-math.inf] * 2]
)
def test_a_tail_without_mass_is_floored_and_has_a_finite_gradient(
    row: list[float], dtype: torch.dtype
) -> None:
    leaf = torch.tensor([row], dtype=dtype, requires_grad=True)
    tail = with_tail(leaf)[0, -1]
    tail.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    if row[0] > -math.inf:
        assert tail.item() == pytest.approx(math.log(FLOOR), rel=1e-6)
        assert bool((leaf.grad == 0).all())
    else:
        assert tail == 0
