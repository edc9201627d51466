from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import scipy.stats  # type: ignore[import-untyped]  # SciPy has no types
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import InputError
from steelyard.regularizers import ConfidencePenalty, Entropy

from .checks import assert_gradients, doubles, plain, value_and_gradients
from .enumeration import Policy, expectation

LOGPROBS = doubles([-0.5, -1.5], [-3.0])
CLASSES = doubles([[-1.0, -2.0], [-0.5, -3.0]], [[-1.1, -1.2]])
SIGN = {"penalty": 1.0, "bonus": -1.0}


def entropies(rows: list[torch.Tensor], temperature: float = 1.0) -> list[float]:
    """SciPy's entropy of the listed classes and the rest, of each token."""
    found = []
    for row in torch.cat(rows).exp().numpy():
        whole = [*row, 1 - row.sum()]
        found.append(float(scipy.stats.entropy([p ** (1 / temperature) for p in whole])))
    return found


@pytest.mark.parametrize("mode", ["penalty", "bonus"])
def test_value_and_gradient_from_samples(mode: Any) -> None:
    term = Entropy(mode=mode)
    value, _ = value_and_gradients(term, [], LOGPROBS)
    assert value == pytest.approx(SIGN[mode] * 5 / 3)

    def promised(rows: list[torch.Tensor]) -> float:
        return SIGN[mode] * -0.5 * torch.cat(rows).square().mean().item()

    assert_gradients(term, [], LOGPROBS, promised)


@pytest.mark.parametrize("mode", ["penalty", "bonus"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_sampled_gradient_is_unbiased_on_policy(mode: Any, count: int) -> None:
    """Every draw of tokens, weighted by its probability."""
    logits = torch.tensor([0.2, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    entropy = -(logits.softmax(0) * logits.log_softmax(0)).sum()
    (expected,) = torch.autograd.grad(SIGN[mode] * entropy, logits)
    estimate = torch.zeros(3, dtype=torch.float64)
    for draws in itertools.product(range(3), repeat=count):
        logprobs = logits.log_softmax(0)[list(draws)]
        loss, _ = Entropy(mode=mode).compute([], [logprobs])
        (gradient,) = torch.autograd.grad(loss, logits)
        estimate += logits.softmax(0)[list(draws)].prod().detach() * gradient
    torch.testing.assert_close(estimate, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["penalty", "bonus"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_entropy_of_classes_agrees_with_scipy(mode: Any, temperature: float) -> None:
    # SciPy 1.17.1.
    term = Entropy(mode=mode, temperature=temperature)

    def by_scipy(rows: list[torch.Tensor]) -> float:
        each = entropies(rows, temperature)
        return SIGN[mode] * sum(each) / len(each)

    value, _ = value_and_gradients(term, [], CLASSES)
    assert value == pytest.approx(by_scipy(CLASSES), rel=1e-9)
    assert_gradients(term, [], CLASSES, by_scipy)


def test_data_may_list_different_numbers_of_classes() -> None:
    rows = [*CLASSES, *doubles([[-1.0, -2.0, -3.0]])]
    each = [*entropies(CLASSES), *entropies(rows[2:])]
    loss, metrics = Entropy().compute([], rows)
    assert loss.item() == metrics["entropy"] == pytest.approx(sum(each) / 4)


def test_normalised_by_the_number_of_classes() -> None:
    loss, _ = Entropy(normalize=True).compute([], doubles([[math.log(1 / 3)] * 2]))
    assert loss.item() == pytest.approx(1.0)
    loss, _ = Entropy(normalize=True, vocabulary=9).compute([], doubles([[math.log(1 / 3)] * 2]))
    assert loss.item() == pytest.approx(0.5)
    loss, _ = Entropy(normalize=True, vocabulary=8).compute([], doubles([-math.log(2)] * 2))
    assert loss.item() == pytest.approx(1 / 3)


def test_the_metric_is_the_entropy_whatever_the_mode() -> None:
    for term in (Entropy(mode="penalty"), Entropy(mode="bonus")):
        _, metrics = term.compute([], LOGPROBS)
        assert metrics == {"entropy": pytest.approx(5 / 3)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_certain_prediction_is_finite(dtype: torch.dtype) -> None:
    rows = [torch.tensor([[0.0, -math.inf], [-1e-8, -20.0]], dtype=dtype)]
    value, (gradient,) = value_and_gradients(Entropy(), [], rows)
    assert 0 <= value < 1e-5
    assert bool(gradient.isfinite().all())


@given(st.lists(st.floats(-9, 0), min_size=2, max_size=6), st.floats(0.05, 0.99))
def test_merging_classes_never_raises_entropy(logits: list[float], mass: float) -> None:
    listed = torch.tensor([logits], dtype=torch.float64).log_softmax(-1) + math.log(mass)
    fine = Entropy().compute([], [listed])[0].item()
    coarse = Entropy().compute([], [listed[:, :-1]])[0].item()
    assert -1e-12 <= coarse <= fine + 1e-9 <= math.log(len(logits) + 1) + 2e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"temperature": 2.0},
            (
                "temperature must be 1 for log-probs [T], which are no distributions, got 2.0: "
                "use [T, K] targets."
            ),
        ),
        (
            {"normalize": True},
            (
                "normalize must come with vocabulary=... for log-probs [T], which do not show the "
                "number of classes, got vocabulary=None."
            ),
        ),
    ],
)
def test_options_that_need_classes(options: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Entropy(**options).compute([], LOGPROBS)
    assert str(caught.value) == message


def test_confidence_penalty_from_samples() -> None:
    # H = 5/3, so a threshold of 2 is missed by 1/3. Without the first token it is 9/4, above 2.
    value, _ = value_and_gradients(ConfidencePenalty(threshold=2.0), [], LOGPROBS)
    assert value == pytest.approx(1 / 3)
    for threshold, first in ((2.0, 1), (3.0, 0)):
        assert_gradients(
            ConfidencePenalty(threshold=threshold),
            [],
            LOGPROBS,
            lambda rows, first=first: 0.5 * torch.cat(rows)[first:].square().sum().item() / 3,  # type: ignore[misc]  # mypy: lambda defaults
        )


def test_confidence_penalty_of_classes_is_per_token() -> None:
    def by_scipy(rows: list[torch.Tensor]) -> float:
        return sum(max(0.0, 1.0 - entropy) for entropy in entropies(rows)) / 3

    term = ConfidencePenalty(threshold=1.0)
    value, _ = value_and_gradients(term, [], CLASSES)
    assert value == pytest.approx(by_scipy(CLASSES), rel=1e-9)
    assert 0 < sum(entropy < 1 for entropy in entropies(CLASSES)) < 3
    assert_gradients(term, [], CLASSES, by_scipy)


def test_entropy_above_the_threshold_has_no_penalty() -> None:
    value, gradients = value_and_gradients(ConfidencePenalty(threshold=1.0), [], LOGPROBS)
    assert value == 0
    assert all(bool((row == 0).all()) for row in gradients)


def test_entropy_of_sequences() -> None:
    term = Entropy(mode="bonus", level="sequence")
    value, gradients = value_and_gradients(term, [], doubles([-1.0, -2.0], [-3.0]))
    assert value == pytest.approx(-2.0)
    assert [row.tolist() for row in gradients] == [
        pytest.approx([-3.0 / 3, -2.0 / 3]),
        pytest.approx([-1.0]),
    ]
    with pytest.raises(InputError, match=r"level must be 'token' for log-probs \[T, K\]"):
        term.compute([], CLASSES)


def test_each_token_of_the_confidence_penalty_is_gated_by_the_others() -> None:
    # Without the third token the entropy is 1.0, with it above: that token alone adds a gradient.
    rows = doubles([-0.9, -1.1, -5.0])
    value, (gradient,) = value_and_gradients(ConfidencePenalty(threshold=1.5), [], rows)
    assert value == 0
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -5.0 / 3])


# Off policy: tokens sampled from another model, over answers of two tokens and three classes.

POLICY, SAMPLING = (Policy(seed=seed, longest=2, vocabulary=3) for seed in (1, 2))


def entropy_per_token(first: torch.Tensor) -> torch.Tensor:
    """Mean entropy of both tokens, with the probabilities of the first that precede the second."""
    p = POLICY.logits.softmax(-1)
    each = -(p * p.log()).sum(-1)
    return (each[0] + (first * each[1:]).sum()) / 2


@pytest.mark.parametrize("sampling", [POLICY, SAMPLING], ids=["on policy", "off policy"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["penalty", "bonus"])
def test_with_importance_value_and_gradient_are_unbiased(
    mode: Any, level: Any, sampling: Policy
) -> None:
    term = Entropy(mode=mode, level=level, importance="logprobs")
    value, gradient = expectation(term, POLICY, sampling, lambda answers: [{} for _ in answers])
    contexts = sampling.logits.softmax(-1)[0].detach()  # held fixed at the level of tokens
    first = contexts if level == "token" else POLICY.logits.softmax(-1)[0]
    expected = SIGN[mode] * entropy_per_token(first)
    assert value == pytest.approx(expected.item(), rel=1e-9)
    torch.testing.assert_close(gradient, POLICY.gradient(expected), rtol=1e-9, atol=1e-12)


def test_without_importance_value_and_gradient_are_biased_off_policy() -> None:
    (value, gradient), (unbiased, true) = (
        expectation(term, POLICY, SAMPLING, lambda answers: [{} for _ in answers])
        for term in (Entropy(), Entropy(importance="logprobs"))
    )
    assert abs(value - unbiased) > 0.2
    assert (gradient - true).norm() > 0.2 * true.norm()


def test_importance_by_hand() -> None:
    data = [plain(logprobs=[-1.0, 0.0], weights=[1.0, 0.0])]
    loss, metrics = Entropy(importance="logprobs").compute(data, doubles([-1.5, -9.0]))
    ratio = math.exp(-0.5)
    assert loss.item() == pytest.approx(1.5 * ratio)
    assert metrics == pytest.approx({"entropy": 1.5 * ratio, "ratio": ratio})
    with pytest.raises(InputError, match=r"importance must be None for log-probs \[T, K\]"):
        Entropy(importance="logprobs").compute([], CLASSES)
