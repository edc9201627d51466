"""Masks, fields and pairs of data, as all regularizers read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.train import _remove_mask
from tinker_cookbook.rl.types import PARSE_ERROR_MASKED_METRIC_KEY, Trajectory, Transition

from steelyard.errors import InputError
from steelyard.regularizers import (
    DPO,
    L1,
    L2,
    NLL,
    ChosenNLL,
    ConfidencePenalty,
    Consistency,
    DemographicParity,
    ElasticNet,
    Entropy,
    JSToReference,
    KLToReference,
    SquaredLogRatio,
    TopologicalConsistency,
)
from steelyard.regularizers._tokens import batch_pairs, batch_rows, mean

from .checks import doubles, plain, tinkered, value_and_gradients

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
    NLL(),
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
            logprobs=[*reference, *more],  # the tokens were sampled
            group=[index],
        )
        for index, reference in enumerate(REFERENCE)
    ]
    return data, [torch.cat([row, torch.tensor(more, dtype=row.dtype)]) for row in LOGPROBS]


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
@pytest.mark.parametrize("make", [plain, tinkered])
@pytest.mark.parametrize("padding", [-7.0, math.nan, -math.inf])
def test_tokens_of_weight_zero_have_no_effect(term: Any, make: Any, padding: float) -> None:
    value, gradients = value_and_gradients(term, *batch(make))
    padded_value, padded = value_and_gradients(term, *batch(make, padding))
    assert padded_value == pytest.approx(value, rel=1e-12)
    for own, longer in zip(gradients, padded, strict=True):
        torch.testing.assert_close(longer[:-1], own, rtol=1e-6, atol=0)
        assert longer[-1] == 0
    assert any(own.abs().sum() > 0 for own in gradients)


def test_a_batch_without_a_counted_token_has_no_gradient_of_dpo() -> None:
    """The other terms are left out: see `test_no_counted_token`."""
    data, logprobs = batch(plain)
    for datum in data:
        datum["loss_fn_inputs"]["weights"] = np.zeros(len(datum["loss_fn_inputs"]["weights"]))
    value, gradients = value_and_gradients(DPO(), data, logprobs)
    assert value == pytest.approx(math.log(2))
    assert all(bool((own == 0).all()) for own in gradients)


def trajectories(metrics: dict[str, float]) -> list[Any]:
    """Data of tinker-cookbook: two turns, the metrics at the second; then a new conversation."""
    turns = [
        ([1, 2, 3], TokensWithLogprobs([4, 5], [-0.5, -0.25]), {}),
        ([1, 2, 3, 4, 5, 6], TokensWithLogprobs([7], [-2.0]), metrics),
        ([8], TokensWithLogprobs([9, 9], [-0.75, -1.5]), {}),
    ]
    transitions = [
        Transition(types.ModelInput.from_ints(prompt), answer, 1.0, False, metrics=own)
        for prompt, answer, own in turns
    ]
    return trajectory_to_data(Trajectory(transitions, types.ModelInput.from_ints([])), 0.5)


@pytest.mark.parametrize("prepare", [lambda datum: datum, _remove_mask], ids=["mask", "logprobs"])
def test_the_sampled_tokens_of_the_cookbooks_data_count(prepare: Any) -> None:
    data = [prepare(datum) for datum in trajectories({})]
    assert [len(datum.loss_fn_inputs["target_tokens"].data) for datum in data] == [6, 2]
    logprobs = doubles([-9.0, -9.0, -1.0, -2.0, -9.0, -4.0], [-3.0, -5.0])
    assert [row.kept.tolist() for row in batch_rows(data, logprobs)] == [
        [-1.0, -2.0, -4.0],
        [-3.0, -5.0],
    ]
    value, gradients = value_and_gradients(L1(), data, logprobs)
    assert value == pytest.approx(3.0)  # (1 + 2 + 4 + 3 + 5) / 5
    assert [row.tolist() for row in gradients] == [
        [0.0, 0.0, -0.2, -0.2, 0.0, -0.2],
        [-0.2, -0.2],
    ]


def test_a_turn_masked_for_a_parse_error_counts_once_its_mask_is_removed() -> None:
    masked = trajectories({PARSE_ERROR_MASKED_METRIC_KEY: 1.0})
    logprobs = doubles([-1.0] * 6, [-1.0] * 2)
    counts = [
        [row.kept.shape[0] for row in batch_rows(data, logprobs)]
        for data in (masked, [_remove_mask(datum) for datum in masked])
    ]
    assert counts == [[2, 2], [3, 2]]


@pytest.mark.parametrize("field", ["mask", "logprobs"])
def test_a_field_that_does_not_fit_is_named(field: str) -> None:
    with pytest.raises(InputError) as caught:
        L1().compute([plain(**{field: [1.0]}), plain()], LOGPROBS)
    assert str(caught.value) == f"{field} of datum 0 must have one number per token, [3], got [1]."


@pytest.mark.parametrize(
    "term",
    [L1(), Entropy(), KLToReference(), DemographicParity(test="none")],
    ids=lambda term: term.name,
)
def test_weights_of_another_shape_name_the_datum(term: Any) -> None:
    data, logprobs = batch(plain)
    data[1]["loss_fn_inputs"]["weights"] = [1.0]
    with pytest.raises(InputError) as caught:
        term.compute(data, logprobs)
    assert str(caught.value) == "weights of datum 1 must have one number per token, [2], got [1]."
    assert caught.value.datum == 1


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


def test_without_data_every_field_is_missing() -> None:
    with pytest.raises(InputError, match="datum 0 must have the field 'reference_logprobs'"):
        KLToReference().compute([], LOGPROBS)


def test_a_function_replaces_a_field() -> None:
    term = KLToReference(reference=lambda datum, index: REFERENCE[index], estimator="k3")
    expected = KLToReference(estimator="k3").compute(*batch(plain))
    assert term.compute([None, None], LOGPROBS) == expected


def test_a_function_that_returns_none_is_named() -> None:
    def teacher(datum: Any, index: int) -> Any:
        return REFERENCE[index] if index == 0 else None

    with pytest.raises(InputError) as caught:
        KLToReference(reference=teacher).compute([None, None], LOGPROBS)
    assert str(caught.value) == "datum 1 must have a value from teacher, got none."


def test_a_field_of_another_shape_names_the_datum() -> None:
    data, logprobs = batch(plain)
    data[1]["loss_fn_inputs"]["reference_logprobs"] = [[-1.0, -2.0]]
    with pytest.raises(InputError) as caught:
        KLToReference().compute(data, logprobs)
    assert str(caught.value) == (
        "reference_logprobs of datum 1 must have the shape of its log-probs, [2], got [1, 2]."
    )


def test_data_and_log_probs_must_match_in_number() -> None:
    with pytest.raises(InputError, match="as many data as log-probs, got 1 and 2"):
        L1().compute([{}], LOGPROBS)


def test_one_tensor_is_one_datum() -> None:
    data = [plain(weights=[1.0, 0.0])]
    assert L2().compute(data, torch.tensor([-1.0, -5.0])) == 1.0


@pytest.mark.parametrize(
    ("term", "shapes", "message"),
    [
        (Entropy(), [(2,), (2, 3)], "datum 1 must have the shape [T] or [T, K], the same"),
        (L1(), [(2, 3, 4)], "datum 0 must have the shape [T] or [T, K], the same"),
        (DPO(), [(2,), (2, 3)], "datum 1 must have the shape [T], got [2, 3]"),
        (DemographicParity(test="none"), [(2, 3)], "datum 0 must have the shape [T], got [2, 3]"),
    ],
)
def test_log_probs_of_a_wrong_shape(term: Any, shapes: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        term.compute([], [torch.zeros(*shape) for shape in shapes])
    assert message in str(caught.value)


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_tokens_of_negative_weight_count(term: Any) -> None:
    """As in training: only a weight of 0 leaves a token out."""
    data, logprobs = batch(plain)
    expected = value_and_gradients(term, data, logprobs)
    for datum in data:
        weights = datum["loss_fn_inputs"]["weights"]
        datum["loss_fn_inputs"]["weights"] = [-2.0 for _ in weights]
    value, gradients = value_and_gradients(term, data, logprobs)
    assert value == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected[1], strict=True))


def test_the_mask_of_negative_weights() -> None:
    (row,) = batch_rows([plain(weights=[-1.0, 0.0, 2.0])], [torch.zeros(3)])
    assert row.mask is not None
    assert row.mask.tolist() == [True, False, True]


def test_weights_per_class_count_if_one_is_not_zero() -> None:
    data = [plain(weights=[[0.0, 1.0], [0.0, 0.0]])]
    (row,) = batch_rows(data, [torch.zeros(2, 2)], classes=True)
    assert row.mask is not None
    assert row.mask.tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "label"),
    [(1, 1), ([2], 2), (torch.tensor([3.0]), 3), (np.array(0.5), 0.5), ("north", "north")],
)
def test_labels(value: Any, label: Any) -> None:
    (row,) = batch_rows([plain(group=value)], [torch.zeros(1)])
    assert row.read_label("group") == label


def test_a_label_that_is_nan_is_an_error() -> None:
    """It equals no other, so that every datum would be a group of its own."""
    (row,) = batch_rows([plain(group=math.nan)], [torch.zeros(1)])
    with pytest.raises(InputError, match=r"group of datum 0 must be one label, got NaN"):
        row.read_label("group")


def test_a_label_with_several_elements_is_an_error() -> None:
    (row,) = batch_rows([plain(group=[1, 2])], [torch.zeros(1)])
    with pytest.raises(
        InputError, match=r"group of datum 0 must be one label, got the shape \[2\]"
    ):
        row.read_label("group")


@pytest.mark.parametrize("value", [0.5, [0.5], torch.tensor([0.5]), [[0.5]]])
def test_a_number(value: Any) -> None:
    (row,) = batch_rows([plain(reward=value)], [torch.zeros(1)])
    assert row.read_number("reward") == 0.5


def test_a_number_that_is_nan_is_an_error() -> None:
    """It is below every threshold and above none: an answer without a reward would be wrong."""
    (row,) = batch_rows([plain(reward=math.nan)], [torch.zeros(1)])
    with pytest.raises(InputError, match=r"reward of datum 0 must be one number, got NaN"):
        row.read_number("reward")


def test_several_numbers_are_an_error() -> None:
    (row,) = batch_rows([plain(reward=[1.0, 2.0])], [torch.zeros(1)])
    with pytest.raises(
        InputError, match=r"reward of datum 0 must be one number, got the shape \[2\]"
    ):
        row.read_number("reward")


def test_pairs_by_label_keep_their_order() -> None:
    rows = batch_rows([plain(pair=label) for label in (7, 3, 3, 7)], [torch.zeros(1)] * 4)
    found = [(a.index, b.index) for a, b in batch_pairs(rows, "pair")]
    assert found == [(0, 3), (1, 2)]


def test_a_datum_without_a_partner() -> None:
    rows = batch_rows([plain(pair=label) for label in (7, 3, 7)], [torch.zeros(1)] * 3)
    with pytest.raises(InputError) as caught:
        batch_pairs(rows, "pair")
    assert str(caught.value) == "a pair must have two data, got datum 1 for the pair 3."
    with pytest.raises(InputError) as caught:
        batch_pairs(rows, None)
    assert str(caught.value) == (
        "paired data must come in twos, got 3 data: datum 2 has no partner."
    )


def test_the_mean_of_an_empty_tensor_is_zero() -> None:
    assert mean(torch.zeros(0)) == 0
    assert mean(torch.tensor([1.0, 3.0])) == 2
