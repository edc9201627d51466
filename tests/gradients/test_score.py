from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import GradientError, TermResultError
from steelyard.gradients.estimators import read_costs, score_gradient
from steelyard.gradients.layout import flatten


def rows(*sizes: int) -> Any:
    return flatten([torch.zeros(size) for size in sizes])[0]


def test_a_value_by_hand() -> None:
    # mean = 2, n - 1 = 2: pulls are -0.5, 0 and 0.5 for every token.
    gradient = score_gradient("t", torch.tensor([1.0, 2.0, 3.0]), [], rows(2, 1, 2))
    assert gradient.tolist() == [-0.5, -0.5, 0.0, 0.5, 0.5]


def test_one_datum_is_pulled_by_its_own_penalty() -> None:
    assert score_gradient("t", torch.tensor([3.0]), None, rows(2)).tolist() == [3.0, 3.0]


class TensorData:
    """As tinker's, in what the estimator uses of it."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def to_torch(self) -> torch.Tensor:
        return torch.tensor(self._values)


@pytest.mark.parametrize(
    "weights",
    [[0.0, 2.0], np.array([0.0, 2.0]), torch.tensor([0.0, 2.0]), TensorData([0.0, 2.0])],
    ids=["list", "numpy", "torch", "tinker"],
)
@pytest.mark.parametrize("as_mapping", [True, False])
def test_tokens_of_weight_zero_get_none(weights: Any, as_mapping: bool) -> None:
    inputs = {"weights": weights}
    first: Any = (
        {"loss_fn_inputs": inputs} if as_mapping else SimpleNamespace(loss_fn_inputs=inputs)
    )
    data = [first, {"loss_fn_inputs": {}}, object()]
    gradient = score_gradient("t", torch.tensor([4.0, 1.0, 1.0]), data, rows(2, 1, 1))
    assert gradient.tolist() == [0.0, 1.0, -0.5, -0.5]


@pytest.mark.parametrize("field", ["mask", "logprobs"])
def test_without_weights_another_field_says_which_tokens_count(field: str) -> None:
    data = [{"loss_fn_inputs": {field: [0.0, -1.0]}}]
    assert score_gradient("t", torch.tensor([4.0]), data, rows(2)).tolist() == [0.0, 4.0]
    with pytest.raises(GradientError, match=f"{field} of datum 0"):
        score_gradient("t", torch.tensor([4.0]), data, rows(3))


def test_tokens_of_negative_weight_count() -> None:
    data = [{"loss_fn_inputs": {"weights": [-2.0, 0.0]}}, {"loss_fn_inputs": {"weights": [-1.0]}}]
    gradient = score_gradient("t", torch.tensor([4.0, 1.0]), data, rows(2, 1))
    assert gradient.tolist() == [1.5, 0.0, -1.5]


def test_it_is_unbiased_for_the_expected_penalty() -> None:
    """Every batch of two draws from a categorical, weighted by its probability."""
    logits = torch.tensor([0.2, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    costs = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    (expected,) = torch.autograd.grad(logits.softmax(0) @ costs, logits)
    estimate = torch.zeros(3, dtype=torch.float64)
    for draws in itertools.product(range(3), repeat=2):
        logprobs = logits.log_softmax(0)[list(draws)]
        pulls = score_gradient("t", costs[list(draws)], [], rows(1, 1))
        (gradient,) = torch.autograd.grad(logprobs, logits, pulls)
        estimate += logits.softmax(0)[list(draws)].prod().detach() * gradient
    torch.testing.assert_close(estimate, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "costs", [[1.0, 2.0], (1, 2), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])]
)
def test_costs_may_come_in_many_forms(costs: Any) -> None:
    assert read_costs("t", costs, rows(3, 4)).tolist() == [1.0, 2.0]


def test_a_number_will_do_for_one_datum() -> None:
    assert read_costs("t", 2.0, rows(3)).tolist() == [2.0]


@pytest.mark.parametrize(
    ("costs", "got"),
    [
        (1.0, "the shape []"),
        ([1.0, 2.0, 3.0], "the shape [3]"),
        ("ab", "'ab'"),
        (None, "None"),
    ],
)
def test_costs_that_do_not_fit(costs: Any, got: str) -> None:
    with pytest.raises(TermResultError) as caught:
        read_costs("t", costs, rows(3, 4))
    assert str(caught.value) == (
        f"with gradient='score' the term must return one penalty per datum, 2 here, got {got} "
        f"(regularizer 't')."
    )


def test_classes_are_refused() -> None:
    layout, _ = flatten([torch.zeros(3), torch.zeros(3, 2)])
    with pytest.raises(GradientError, match=r"needs one log-prob per token.*shape \[3, 2\]"):
        read_costs("t", [1.0, 2.0], layout)


def test_weights_must_fit_the_log_probs() -> None:
    data = [{"loss_fn_inputs": {"weights": [1.0]}}]
    with pytest.raises(GradientError, match=r"weights of datum 0 .* \[2\], got \[1\]") as caught:
        score_gradient("t", torch.tensor([1.0]), data, rows(2))
    assert caught.value.datum == 0


def test_data_must_be_as_many_as_log_probs() -> None:
    with pytest.raises(GradientError, match="as many data as log-probs, got 1 and 2"):
        score_gradient("t", torch.tensor([1.0, 2.0]), [{}], rows(2, 2))
