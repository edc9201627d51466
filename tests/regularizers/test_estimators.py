"""Estimators from sampled tokens, against sums over whole distributions; the tail class."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steelyard.regularizers._estimators import (
    TAIL_FLOOR,
    reward_to_go,
    sampled_confidence,
    sampled_entropy,
    sampled_js,
    sampled_kl,
    sequence_entropy,
    with_gradient_of,
    with_tail,
)

from .checks import doubles, numerical_gradients

LOGITS, REFERENCE_LOGITS = doubles([0.2, -0.7, 1.1, -2.0], [-0.5, -1.9, -1.5, 0.3])


def expectation(estimator: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, Tensor]:
    """Exact expectation over a sampled token of an estimator's value and logit gradient."""
    logits = LOGITS.clone().requires_grad_()
    reference = REFERENCE_LOGITS.log_softmax(0)
    value, gradient = 0.0, torch.zeros_like(LOGITS)
    for token, probability in enumerate(LOGITS.softmax(0).tolist()):
        estimate = estimator(logits.log_softmax(0)[token, None], reference[token, None])
        value += probability * estimate.item()
        gradient += probability * torch.autograd.grad(estimate, logits)[0]
    return value, gradient


def exact(formula: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, Tensor]:
    """Value and logit gradient of a formula over the probabilities p and r."""
    logits = LOGITS.clone().requires_grad_()
    value = formula(logits.softmax(0), REFERENCE_LOGITS.softmax(0))
    return value.item(), torch.autograd.grad(value, logits)[0]


def entropy(p: Tensor, _: Tensor) -> Tensor:
    return -(p * p.log()).sum()


def kl(p: Tensor, r: Tensor) -> Tensor:
    return (p * (p / r).log()).sum()


def js(p: Tensor, r: Tensor) -> Tensor:
    m = (p + r) / 2
    return 0.5 * kl(p, m) + 0.5 * kl(r, m)


def test_value_and_gradient_of_two_tensors() -> None:
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    mixed = with_gradient_of(x.square().sum(), value=10 * x.sum())
    mixed.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert mixed.item() == -10.0
    assert x.grad is not None
    assert x.grad.tolist() == [4.0, -6.0]


def test_entropy_is_unbiased_in_value_and_gradient() -> None:
    value, gradient = expectation(lambda p, _: sampled_entropy(p))
    expected, expected_gradient = exact(entropy)
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_js_is_unbiased_in_value_and_gradient() -> None:
    value, gradient = expectation(sampled_js)
    expected, expected_gradient = exact(js)
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_an_unbiased_value(estimator: str) -> None:
    value, _ = expectation(lambda p, r: sampled_kl(p, r)[estimator])
    assert value == pytest.approx(exact(kl)[0], rel=1e-12)


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("k1", lambda p, r: 0.0 * p.sum()), ("k2", kl), ("k3", lambda p, r: kl(r, p))],
)
def test_the_expected_gradient_of_each_kl_estimator(
    estimator: str, formula: Callable[[Tensor, Tensor], Tensor]
) -> None:
    _, gradient = expectation(lambda p, r: sampled_kl(p, r)[estimator])
    torch.testing.assert_close(gradient, exact(formula)[1], rtol=1e-12, atol=1e-12)


def test_kl_estimates_by_hand() -> None:
    estimates = sampled_kl(*doubles([-1.5, -1.0], [-1.0, -2.0]))
    # δ = -0.5 and 1.
    assert {name: value.item() for name, value in estimates.items()} == pytest.approx(
        {
            "k1": 0.25,
            "k2": 0.3125,
            "k3": ((math.exp(0.5) - 1 - 0.5) + (math.exp(-1) - 1 + 1)) / 2,
            "clamped_k3": ((math.exp(0.5) - 1 - 0.5) + (math.exp(-1) - 1 + 1)) / 2,
        }
    )


def test_no_tokens_estimate_zero() -> None:
    empty = torch.zeros(0)
    values = [sampled_entropy(empty), sampled_js(empty, empty), *sampled_kl(empty, empty).values()]
    assert [value.item() for value in values] == [0.0] * 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_js_of_a_token_that_the_reference_rules_out(dtype: torch.dtype) -> None:
    """f(0) = ½ log 2, and the gradient -½ log ½ is the same; 0 · log 0 must not be NaN."""
    leaf = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    value = sampled_js(leaf, torch.tensor([-math.inf], dtype=dtype))
    (gradient,) = torch.autograd.grad(value, leaf)
    assert [value.item(), gradient.item()] == pytest.approx([0.5 * math.log(2)] * 2, rel=4e-3)


def test_js_of_a_large_ratio_is_finite() -> None:
    """u = e^80 is finite in float32; (1 + u)/2 enters as a logarithm."""
    leaf = torch.tensor([-80.0], requires_grad=True)
    value = sampled_js(leaf, torch.tensor([0.0]))
    value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert math.isfinite(value.item())
    assert leaf.grad is not None
    assert leaf.grad.item() == pytest.approx(-0.5 * (80 - math.log(2)))


@given(st.lists(st.floats(-8, 0), min_size=1, max_size=5), st.floats(0.01, 0.99))
def test_classes_and_tail_are_a_distribution(logits: list[float], mass: float) -> None:
    listed = torch.tensor([logits], dtype=torch.float64).log_softmax(-1) + math.log(mass)
    whole = with_tail(listed)
    assert torch.equal(whole[:, :-1], listed)
    assert whole.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert whole[0, -1].item() == pytest.approx(math.log1p(-mass), rel=1e-9)


def test_the_gradient_flows_through_the_tail() -> None:
    (listed,) = doubles([[-1.0, -2.0]])
    leaf = listed.clone().requires_grad_()
    with_tail(leaf)[0, -1].backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    (expected,) = numerical_gradients(lambda lp: math.log(1 - lp[0].exp().sum().item()), [listed])
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "row", [[0.0], [-math.log(2)] * 2, [0.0, -math.inf], [-1e-9], [0.1], [-math.inf] * 2]
)
def test_an_empty_tail_is_floored_and_has_a_finite_gradient(
    row: list[float], dtype: torch.dtype
) -> None:
    leaf = torch.tensor([row], dtype=dtype, requires_grad=True)
    tail = with_tail(leaf)[0, -1]
    tail.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert leaf.grad is not None
    assert bool(leaf.grad.isfinite().all())
    if row[0] > -math.inf:
        assert tail.item() == pytest.approx(math.log(TAIL_FLOOR), rel=1e-6)
        assert bool((leaf.grad == 0).all())
    else:
        assert tail == 0


# Sequences of two tokens over two classes: the first chooses the context of the second.
FIRST, SECOND = doubles([-0.1, 0.1], [[5.0, -3.0], [0.2, 0.1]])
FIRST_REFERENCE, SECOND_REFERENCE = doubles([0.0, 0.5], [[-0.5, 0.3], [1.0, -1.0]])


def over_sequences(estimator: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, list[Tensor]]:
    """Exact expectation of an estimator's value and gradient over the four sequences."""
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    value = 0.0
    gradients = [torch.zeros_like(x) for x in (first, second)]
    for a in range(2):
        for b in range(2):
            own = torch.stack([first.log_softmax(0)[a], second.log_softmax(1)[a, b]])
            reference = torch.stack(
                [FIRST_REFERENCE.log_softmax(0)[a], SECOND_REFERENCE.log_softmax(1)[a, b]]
            )
            probability = own.sum().exp().item()
            estimate = estimator(own, reference)
            value += probability * estimate.item()
            found = torch.autograd.grad(estimate, (first, second))
            gradients = [g + probability * each for g, each in zip(gradients, found, strict=True)]
    return value, gradients


def exact_over_sequences(per_token: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Gradient of the expectation, per token, of `Σ_t per_token(p_t, r_t)` over sequences."""
    first, second = FIRST.clone().requires_grad_(), SECOND.clone().requires_grad_()
    p = first.softmax(0)
    total = per_token(p, FIRST_REFERENCE.softmax(0))
    for a in range(2):
        total = total + p[a] * per_token(second.softmax(1)[a], SECOND_REFERENCE.softmax(1)[a])
    return torch.autograd.grad(total / 2, (first, second))


def test_the_sequence_estimator_has_the_gradient_of_the_entropy_of_sequences() -> None:
    _, found = over_sequences(lambda own, _: sequence_entropy([own]))
    for mine, wanted in zip(found, exact_over_sequences(entropy), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_with_contexts_fixed_the_gradient_of_the_first_token_may_have_the_other_sign() -> None:
    """The token-level estimator leaves out the contexts that the first token leads to."""
    _, (first, second) = over_sequences(lambda own, _: sampled_entropy(own))
    whole_first, whole_second = exact_over_sequences(entropy)
    torch.testing.assert_close(second, whole_second)
    assert first[0] * whole_first[0] < 0


def test_reward_to_go_sums_each_datum_backwards() -> None:
    rewards = doubles([1.0, 2.0, 4.0], [8.0])
    assert [reward_to_go(row).tolist() for row in rewards] == [[7.0, 6.0, 4.0], [8.0]]


@pytest.mark.parametrize("count", [1, 2, 4, 6])
@pytest.mark.parametrize("threshold", [0.3, 0.8, 1.2])
def test_the_confidence_estimator_is_what_its_docstring_says(count: int, threshold: float) -> None:
    """All batches of `count` tokens over three classes, with their probabilities."""
    given = torch.tensor([1.2, -0.3, 0.1], dtype=torch.float64)
    logits = given.clone().requires_grad_()
    p = given.softmax(0)
    expected, passed = torch.zeros_like(given), 0.0
    for batch in itertools.product(range(3), repeat=count):
        tokens = torch.tensor(batch)
        own = logits.log_softmax(0)[tokens]
        probability = p[tokens].prod().item()
        (gradient,) = torch.autograd.grad(sampled_confidence(own, threshold), logits)
        expected += probability * gradient
        others = -own[1:].mean().item() if count > 1 else -math.inf
        passed += probability * (others < threshold)
    whole = logits.softmax(0)
    (bonus,) = torch.autograd.grad((whole * whole.log()).sum(), logits)
    torch.testing.assert_close(expected, passed * bonus)
