"""`KLToReference(estimator="auto")`: what it estimates on sampled and on fixed tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, schedules
from steelyard.doctor import FindingWarning
from steelyard.errors import InputError, SpecError
from steelyard.regularizers import (
    Adaptive,
    Entropy,
    JSToReference,
    KLToReference,
    TruncatedImportanceSampling,
)

from .checks import doubles, plain, value_and_gradients
from .enumeration import Policy, expectation
from .training import Trained, next_tokens, policy_gradient, sequence, train

POLICY, SAMPLING, TEACHER = (Policy(seed=seed, longest=2, vocabulary=3) for seed in (1, 2, 3))
LOGPROBS = doubles([-0.5, -1.5], [-3.0])
REFERENCE = doubles([-0.9, -1.0], [-2.0])
DELTA = np.array([0.4, -0.5, -1.0])
FIXED = [plain(reference_logprobs=row) for row in REFERENCE]
SAMPLED = [
    plain(reference_logprobs=row, logprobs=own)
    for row, own in zip(REFERENCE, LOGPROBS, strict=True)
]


def teacher_fields(answers: Any) -> list[dict[str, Any]]:
    return [{"reference_logprobs": TEACHER.logprobs(answer).detach()} for answer in answers]


def kl_per_token(contexts_of: Policy) -> Tensor:
    """Mean KL(p‖r) over both tokens, by sums over the vocabulary in each context."""
    p, r = (each.logits.log_softmax(-1) for each in (POLICY, TEACHER))
    each = (p.exp() * (p - r.detach())).sum(-1)
    reached = contexts_of.logits.softmax(-1)[0]
    return (each[0] + (reached * each[1:]).sum()) / 2


# On policy.


def test_on_policy_value_and_gradient_are_those_of_kl() -> None:
    value, gradient = expectation(KLToReference(), POLICY, POLICY, teacher_fields)
    fixed = Policy(seed=0, longest=2, vocabulary=3)  # the contexts, which are held fixed
    fixed.logits = POLICY.logits.detach()
    expected = kl_per_token(fixed)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, POLICY.gradient(expected), rtol=1e-12, atol=1e-12)


def test_at_the_sequence_level_they_are_those_of_the_sequence() -> None:
    term = KLToReference(level="sequence")
    value, gradient = expectation(term, POLICY, POLICY, teacher_fields)
    expected = kl_per_token(POLICY)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, POLICY.gradient(expected), rtol=1e-12, atol=1e-12)


def test_with_importance_at_the_sequence_level_they_are_those_of_the_sequence() -> None:
    term = KLToReference(level="sequence", importance="logprobs")
    value, gradient = expectation(term, POLICY, SAMPLING, teacher_fields)
    expected = kl_per_token(POLICY)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, POLICY.gradient(expected), rtol=1e-12, atol=1e-12)


def test_with_importance_it_is_the_weighted_k3() -> None:
    found, wanted = (
        expectation(term, POLICY, SAMPLING, teacher_fields)
        for term in (
            KLToReference(importance="logprobs"),
            KLToReference(importance="logprobs", estimator="k3"),
        )
    )
    assert found[0] == wanted[0]
    assert torch.equal(found[1], wanted[1])


def test_on_policy_by_hand() -> None:
    value, gradients = value_and_gradients(KLToReference(), SAMPLED, LOGPROBS)
    k3 = (np.exp(-DELTA) - 1 + DELTA).mean()
    assert value == pytest.approx(k3, rel=1e-12)
    np.testing.assert_allclose(torch.cat(gradients).numpy(), DELTA / 3, rtol=1e-12)
    _, metrics = KLToReference().compute(SAMPLED, LOGPROBS)
    expected = {"k1": DELTA.mean(), "k2": 0.5 * (DELTA**2).mean(), "k3": k3}
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_without_data_to_ask_the_tokens_count_as_sampled() -> None:
    rows = iter([*REFERENCE, *REFERENCE])
    term = KLToReference(reference=lambda _, __: next(rows))
    assert term.compute([], LOGPROBS)[0] == KLToReference().compute(SAMPLED, LOGPROBS)[0]


def test_k3_of_kl_0_3_is_two_thirds_of_k2() -> None:
    """The fault that the default had: a bound of 0.3 on k2 holds a KL of 0.2."""
    p, r = (row.log() for row in doubles([0.3, 0.7], [0.06, 0.94]))
    means = {"auto": 0.0, "k2": 0.0}
    for estimator in means:
        for token in (0, 1):
            data = [plain(reference_logprobs=r[token, None], logprobs=p[token, None])]
            term = KLToReference(estimator=estimator)  # type: ignore[arg-type]  # both are
            value, _ = term.compute(data, [p[token, None]])
            means[estimator] += p[token].exp().item() * value.item()
    exact = (p.exp() * (p - r)).sum().item()
    assert means["auto"] == pytest.approx(exact, rel=1e-12)
    assert means["k2"] > 1.4 * exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("delta", [50.0, -50.0, 1000.0, -1000.0])
def test_an_extreme_log_ratio_is_clamped_in_the_value(delta: float, dtype: Any) -> None:
    own = [torch.tensor([-1.0 - max(-delta, 0.0), -1.0], dtype=dtype)]
    data = [plain(reference_logprobs=[own[0][0].item() - delta, -1.0], logprobs=own[0].tolist())]
    value, (gradient,) = value_and_gradients(KLToReference(), data, own)
    clamped = math.copysign(20.0, delta)
    expected = (math.exp(-clamped) - 1 + clamped) / 2
    assert value == pytest.approx(expected, rel=1e-5)
    assert gradient.tolist() == pytest.approx([delta / 2, 0.0], rel=1e-5)
    _, metrics = KLToReference().compute(data, own)
    assert metrics["k3"] == pytest.approx(expected, rel=1e-5)
    assert all(math.isfinite(metric) for metric in metrics.values())


@pytest.mark.parametrize("delta", [50.0, -50.0, 1000.0, -1000.0])
def test_js_is_finite_at_an_extreme_log_ratio(delta: float) -> None:
    own = [torch.tensor([-1.0 - max(-delta, 0.0)])]
    data = [plain(reference_logprobs=[own[0][0].item() - delta])]
    value, (gradient,) = value_and_gradients(JSToReference(), data, own)
    u = math.exp(min(-delta, 20.0))
    log_middle = math.log1p(u) - math.log(2)
    expected = 0.5 * (u * (min(-delta, 20.0) - log_middle) - log_middle)
    assert value == pytest.approx(expected, rel=1e-5)
    # -½ log((1 + u)/2), without the limit.
    slope = -0.5 * (max(-delta, 0.0) - math.log(2))
    assert gradient.item() == pytest.approx(slope, rel=1e-5)


# On fixed data.


def test_on_fixed_data_it_is_a_penalty_on_the_log_ratio_named_so() -> None:
    value, gradients = value_and_gradients(KLToReference(), FIXED, LOGPROBS)
    half = 0.5 * (DELTA**2).mean()
    assert value == pytest.approx(half, rel=1e-12)
    np.testing.assert_allclose(torch.cat(gradients).numpy(), DELTA / 3, rtol=1e-12)
    _, metrics = KLToReference().compute(FIXED, LOGPROBS)
    assert metrics == pytest.approx({"log_ratio": DELTA.mean(), "half_squared_log_ratio": half})


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_an_explicit_estimator_is_the_same_on_all_data(estimator: Any) -> None:
    term = KLToReference(estimator=estimator)
    on_fixed, on_sampled = (term.compute(data, LOGPROBS) for data in (FIXED, SAMPLED))
    assert on_fixed == on_sampled
    assert on_fixed[1].keys() == {"k1", "k2", "k3"}


def test_a_batch_of_both_is_an_error() -> None:
    with pytest.raises(InputError, match="got datum 0 with and datum 1 without"):
        KLToReference().compute([SAMPLED[0], FIXED[1]], LOGPROBS)


# k1 measures, and is nothing to train on.


@pytest.mark.parametrize(
    ("limit", "shown"),
    [
        ({"at_most": 0.3}, "at_most=0.3"),
        ({"at_least": 0.3}, "at_least=0.3"),
        ({"weight": 0.1}, "weight=0.1"),
    ],
)
def test_k1_is_no_objective(limit: dict[str, Any], shown: str) -> None:
    with pytest.raises(SpecError) as caught:
        RegularizerSpec(KLToReference(estimator="k1"), name="kl", **limit)
    assert str(caught.value) == (
        f"a term that only measures must have weight=0 or gradient='none', got {shown}: the "
        f"gradient of estimator='k1' at level='token' has the expectation 0; use "
        f"estimator='auto', or level='sequence', or read the metric k1 (regularizer 'kl')."
    )


@pytest.mark.parametrize(
    "wrapped",
    [
        Adaptive(regularizer=KLToReference(estimator="k1"), target=0.1),
        TruncatedImportanceSampling(regularizer=KLToReference(estimator="k1")),
    ],
)
def test_neither_is_one_that_wraps_it(wrapped: Any) -> None:
    with pytest.raises(SpecError, match="a term that only measures must have weight=0"):
        RegularizerSpec(wrapped, schedules.constant(0.1))
    assert RegularizerSpec(wrapped, 0.0).weight == 0


@pytest.mark.parametrize(
    "term",
    [
        KLToReference(estimator="k1", level="sequence"),
        KLToReference(estimator="k1", importance="logprobs"),
        KLToReference(estimator="k2"),
        KLToReference(),
    ],
)
def test_estimators_with_a_gradient_may_be_bounded(term: KLToReference) -> None:
    assert RegularizerSpec(term, at_most=0.3).is_bounded


def test_k1_may_be_measured() -> None:
    term = KLToReference(estimator="k1")
    measured: list[dict[str, Any]] = [{"weight": 0.0}, {"weight": 1.0, "gradient": "none"}]
    for fields in measured:
        spec = RegularizerSpec(term, name="kl", **fields)
        output = Pipeline(lambda _, rows: rows[0].sum(), [spec]).compute(SAMPLED, LOGPROBS)
        assert output.regularizers["kl"].value == pytest.approx(DELTA.mean())
        assert RegularizerSpec(term, **fields).measuring().weight == 0


# Importance ratios at the sequence level.


def test_the_ratio_of_a_token_is_of_it_and_those_before_it() -> None:
    """Per decision: the tokens after one do not multiply its ratio, whose variance they raise."""
    own, sampled, reference = doubles([-1.0, -1.5, -2.0], [-1.2, -1.0, -2.5], [-0.9, -1.6, -1.4])
    data = [
        plain(logprobs=sampled, reference_logprobs=reference),
        plain(logprobs=sampled[:1], reference_logprobs=reference[:1]),
    ]
    rows = [own, own[:1]]
    w = np.exp(np.cumsum([0.2, -0.5, 0.5]))
    w = np.array([*w, w[0]])
    delta = np.array([-0.1, 0.1, -0.6, -0.1])
    term = KLToReference(importance="logprobs", level="sequence")
    loss, metrics = term.compute(data, rows)
    assert loss.item() == pytest.approx((w * (np.exp(-delta) - 1 + delta)).mean(), rel=1e-12)
    assert metrics["ratio"] == pytest.approx(w.mean(), rel=1e-12)
    _, gradients = value_and_gradients(term, data, rows)
    costs = w * delta
    to_go = [costs[:3].sum(), costs[1:3].sum(), costs[2], costs[3]]
    np.testing.assert_allclose(torch.cat(gradients).numpy(), np.array(to_go) / 4, rtol=1e-12)
    entropy, metrics = Entropy(importance="logprobs", level="sequence").compute(data, rows)
    logprobs = np.array([-1.0, -1.5, -2.0, -1.0])
    assert entropy.item() == pytest.approx(-(w * logprobs).mean(), rel=1e-12)
    assert metrics["ratio"] == pytest.approx(w.mean(), rel=1e-12)


# A bound, on the engine.

PROMPT = [3, 0]  # the second is not read
BOUND, STEPS = 0.3, 400


class Rewarded:
    """Tokens sampled from the model, of which the first 30 are rewarded; measures the KL."""

    def __init__(self) -> None:
        (self._reference,) = next_tokens(Trained(), PROMPT)
        self.kls: list[float] = []
        self.k2s: list[float] = []

    def __call__(self, trained: Trained, generator: torch.Generator) -> list[Any]:
        (p,), r = next_tokens(trained, PROMPT), self._reference
        # Over all tokens of the vocabulary.
        self.kls.append((p.exp() * (p - r)).sum().item())
        self.k2s.append((p.exp() * (p - r).square() / 2).sum().item())
        tokens = torch.multinomial(p.exp(), 64, replacement=True, generator=generator)
        gains = (tokens < 30).float()
        return [
            sequence(
                [PROMPT[0], int(token)],
                advantages=gain[None],
                logprobs=p[token, None],
                reference_logprobs=r[token, None],
            )
            for token, gain in zip(tokens, gains - gains.mean(), strict=True)
        ]


def held(estimator: Any) -> tuple[float, float]:
    """KL and expectation of k2, means of the last third of a training with a bound."""
    data, last = Rewarded(), STEPS // 3
    spec = RegularizerSpec(KLToReference(estimator=estimator), name="kl", at_most=BOUND)
    train(data, policy_gradient, [spec], steps=STEPS, rate=5e-4)
    return sum(data.kls[-last:]) / last, sum(data.k2s[-last:]) / last


def test_a_bound_holds_the_kl_over_the_whole_vocabulary() -> None:
    kl, _ = held("auto")
    assert 0.85 * BOUND < kl < 1.2 * BOUND


def test_the_policy_itself_is_no_reference() -> None:
    """The field `logprobs` of fresh samples: whatever the weight, nothing is held."""

    def drift(*terms: RegularizerSpec) -> float:
        data = Rewarded()
        train(data, policy_gradient, terms, steps=20)
        return data.kls[-1]

    without = drift()
    with pytest.warns(FindingWarning, match="'kl' has no gradient") as caught:
        itself = drift(RegularizerSpec(KLToReference(reference="logprobs"), 2000.0, "kl"))
    assert len(caught) == 1
    assert itself > 0.5 * without
    assert drift(RegularizerSpec(KLToReference(), 20.0, "kl")) < 0.1 * without


def test_a_bound_on_k2_holds_less() -> None:
    kl, k2 = held("k2")
    assert 0.85 * BOUND < k2 < 1.2 * BOUND
    assert k2 > 1.3 * kl
    assert kl < 0.85 * BOUND
