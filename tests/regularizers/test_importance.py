"""Truncated and masked importance weights, against sums over all answers of a tiny policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.errors import InputError, SpecError
from steelyard.regularizers import (
    L2,
    Adaptive,
    EMADrift,
    Entropy,
    JSToReference,
    KLToReference,
    MaskedImportanceSampling,
    OverlongPenalty,
    TopologicalConsistency,
    TruncatedImportanceSampling,
    WholeVocabulary,
)
from steelyard.spec.protocol import measurement

from .checks import doubles, plain, value_and_gradients
from .enumeration import Policy, expectation
from .required_options import points

TOKEN, OTHER_TOKEN, TEACHER = (Policy(seed=seed, longest=1, vocabulary=4) for seed in (1, 2, 3))
ANSWERS, OTHER_ANSWERS = (Policy(seed=seed, longest=3, ends=True) for seed in (4, 5))


def teacher_fields(answers: Any) -> list[dict[str, Any]]:
    return [{"reference_logprobs": TEACHER.logprobs(answer).detach()} for answer in answers]


@pytest.mark.parametrize(
    "term", [Entropy(), KLToReference(), KLToReference(estimator="k3"), JSToReference()]
)
def test_without_bounds_the_expected_gradient_is_that_on_policy(term: Any) -> None:
    weighted = TruncatedImportanceSampling(regularizer=term, high=None)
    _, found = expectation(weighted, TOKEN, OTHER_TOKEN, teacher_fields)
    _, wanted = expectation(term, TOKEN, TOKEN, teacher_fields)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    _, biased = expectation(term, TOKEN, OTHER_TOKEN, teacher_fields)
    assert (biased - wanted).norm() > 0.2 * wanted.norm()


@pytest.mark.parametrize(
    ("wrapper", "mass"),
    [
        (TruncatedImportanceSampling, lambda p, q: p.clamp(0.4 * q, 1.2 * q)),
        (MaskedImportanceSampling, lambda p, q: p * (p >= 0.4 * q) * (p <= 1.2 * q)),
    ],
)
def test_with_bounds_the_expected_gradient_is_that_of_the_bounded_mass(
    wrapper: Any, mass: Any
) -> None:
    """`Σ mass · g ∇ log p`, with g = log p - log r of k2."""
    term = wrapper(regularizer=KLToReference(), low=0.4, high=1.2)
    _, found = expectation(term, TOKEN, OTHER_TOKEN, teacher_fields)
    p, q, r = (each.logits.log_softmax(-1)[0] for each in (TOKEN, OTHER_TOKEN, TEACHER))
    counted = mass(p.exp(), q.exp())
    assert 0 < (counted != p.exp()).sum() < len(p)
    surrogate = (counted * (p - r)).detach() @ p
    torch.testing.assert_close(found, TOKEN.gradient(surrogate), rtol=1e-9, atol=1e-12)


def cost(answer: tuple[int, ...]) -> float:
    return math.sin(3.0 * len(answer) + answer[-1])


class Costs:
    """One penalty per datum, in its field `cost`."""

    name = "costs"
    gradient = "score"

    def compute(self, data: Any, logprobs: Any) -> list[float]:
        return [datum["loss_fn_inputs"]["cost"] for datum in data]


class AsyncCosts(Costs):
    async def compute(self, data: Any, logprobs: Any) -> list[float]:  # type: ignore[override]
        return Costs.compute(self, data, logprobs)


def cost_fields(answers: Any) -> list[dict[str, Any]]:
    return [{"cost": cost(answer)} for answer in answers]


@pytest.mark.parametrize("sampling", [ANSWERS, OTHER_ANSWERS], ids=["on policy", "off policy"])
@pytest.mark.parametrize("count", [1, 3])
def test_penalties_per_datum_have_the_gradient_of_their_expectation(
    count: int, sampling: Policy
) -> None:
    """Whole answers, so the ratio of the whole answer: exact with and without a baseline."""
    term = TruncatedImportanceSampling(regularizer=Costs(), level="sequence", high=None)
    _, found = expectation(term, ANSWERS, sampling, cost_fields, count=count)
    wanted = ANSWERS.gradient(ANSWERS.expected(cost))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def reinforce(data: Any, logprobs: list[Tensor]) -> Tensor:
    """Policy gradient as a base loss: the mean over data of cost · log p."""
    costs = [datum["loss_fn_inputs"]["cost"] for datum in data]
    return torch.stack([c * row.sum() for c, row in zip(costs, logprobs, strict=True)]).mean()


def test_a_base_loss_may_be_wrapped() -> None:
    base = TruncatedImportanceSampling(regularizer=reinforce, level="sequence", high=None)
    found = torch.zeros_like(ANSWERS.logits)
    for answer in OTHER_ANSWERS.answers:
        data = [plain(logprobs=OTHER_ANSWERS.logprobs(answer).detach(), cost=cost(answer))]
        own = ANSWERS.logprobs(answer)
        output = Pipeline(base).compute(data, [own.detach()])
        (gradient,) = torch.autograd.grad(own, ANSWERS.logits, output.gradients)
        found += OTHER_ANSWERS.probability(answer) * gradient
    wanted = ANSWERS.gradient(ANSWERS.expected(cost))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


DATA = [
    plain(logprobs=[-1.0, -2.0, 0.0], weights=[1.0, 1.0, 0.0]),
    plain(logprobs=[-1.0]),
]
LOGPROBS = doubles([-1.5, -1.0, math.nan], [-0.5])
RATIOS = [math.exp(-0.5), math.exp(1.0), math.exp(0.5)]


@pytest.mark.parametrize(
    ("term", "weights", "clipped"),
    [
        (TruncatedImportanceSampling(regularizer=L2()), [RATIOS[0], 2.0, RATIOS[2]], 1 / 3),
        (
            TruncatedImportanceSampling(regularizer=L2(), low=1.0, high=None),
            [1.0, RATIOS[1], RATIOS[2]],
            1 / 3,
        ),
        (MaskedImportanceSampling(regularizer=L2(), high=2.0), [RATIOS[0], 0.0, RATIOS[2]], 1 / 3),
        (
            MaskedImportanceSampling(regularizer=L2(), low=None, high=1.0),
            [RATIOS[0], 0.0, 0.0],
            2 / 3,
        ),
        (
            TruncatedImportanceSampling(regularizer=L2(), level="sequence"),
            [RATIOS[2], RATIOS[2], RATIOS[2]],  # e^(-0.5 + 1) of the first datum
            0.0,
        ),
        (
            MaskedImportanceSampling(regularizer=L2(), low=None, high=None),
            RATIOS,
            0.0,
        ),
    ],
)
def test_weights_by_hand(term: Any, weights: list[float], clipped: float) -> None:
    value, gradients = value_and_gradients(term, DATA, LOGPROBS)
    assert value == pytest.approx((1.5**2 + 1 + 0.25) / 3)
    plain_gradient = [2 * x / 3 for x in (-1.5, -1.0, -0.5)]
    expected = [w * g for w, g in zip(weights, plain_gradient, strict=True)]
    assert torch.cat(gradients).tolist() == pytest.approx([*expected[:2], 0.0, expected[2]])
    _, metrics = term.compute(DATA, LOGPROBS)
    assert metrics["clipped"] == pytest.approx(clipped)
    assert metrics["ratio_max"] == pytest.approx(
        max(RATIOS) if term.level == "token" else RATIOS[2]
    )


def test_the_ratio_may_be_that_of_an_older_model() -> None:
    data = [plain(logprobs=[-1.0], old_logprobs=[-1.25])]
    term = TruncatedImportanceSampling(regularizer=L2(), old="old_logprobs")
    _, (gradient,) = value_and_gradients(term, data, doubles([-3.0]))
    assert gradient.item() == pytest.approx(-6.0 * math.exp(-0.25))


def test_penalties_of_a_coroutine() -> None:
    data = [plain(logprobs=[-1.0, -9.0], cost=3.0), plain(logprobs=[-2.0], cost=1.0)]
    rows = doubles([-1.5, -9.0], [-1.0])
    for inner in (Costs(), AsyncCosts()):
        term = MaskedImportanceSampling(regularizer=inner, high=2.0)
        spec = RegularizerSpec(term, 1.0)
        assert (spec.name, spec.gradient) == ("masked_costs", "autograd")
        value, gradients = value_and_gradients(
            term, data, rows, run_in="async" if spec.is_async else "inline"
        )
        assert value == 2.0
        # The costs less the other's are 2 and -2, of two data; the ratios e^-0.5, 1 and e.
        assert [row.tolist() for row in gradients] == [
            pytest.approx([math.exp(-0.5), 1.0]),
            pytest.approx([0.0]),
        ]


def test_options_of_the_calls_and_a_plain_function_that_returns_an_awaitable() -> None:
    async def answer(penalty: Tensor) -> Tensor:
        return penalty

    def asked(data: Any, logprobs: list[Tensor], scale: float) -> Any:
        return answer(scale * logprobs[0].sum())

    described = {"fn": asked, "options": {"scale": 3.0}}
    term = TruncatedImportanceSampling(regularizer=described, high=None)
    value, (gradient,) = value_and_gradients(term, [plain(logprobs=[-1.0])], doubles([-2.0]))
    assert value == -6.0
    assert gradient.item() == pytest.approx(3 * math.exp(-1))


def test_held_out_data_need_no_sampling_log_probs() -> None:
    term = TruncatedImportanceSampling(regularizer=L2())
    assert measurement(term)([], doubles([-2.0])).item() == 4.0


def test_the_structure_of_the_log_probs_is_kept() -> None:
    seen = []

    def record(data: Any, logprobs: Any) -> Any:
        seen.append(type(logprobs))
        return torch.as_tensor(logprobs if isinstance(logprobs, Tensor) else logprobs[0]).sum()

    term = TruncatedImportanceSampling(regularizer=record)
    assert term.name == "truncated_importance_sampling"
    data = [plain(logprobs=[-1.0])]
    term.compute(data, torch.tensor([-1.0]))
    term.compute(data, [torch.tensor([-1.0])])
    assert seen == [Tensor, list]


def test_a_log_prob_of_minus_infinity_passes_through() -> None:
    def count(data: Any, logprobs: list[Tensor]) -> Tensor:
        return logprobs[0].exp().sum()

    term = TruncatedImportanceSampling(regularizer=count)
    loss, _ = term.compute([plain(logprobs=[-1.0, -1.0])], doubles([-math.inf, 0.0]))
    assert loss.item() == 1.0


def test_an_empty_batch() -> None:
    data = [plain(logprobs=[-1.0], weights=[0.0])]
    base = {"fn": "dpo", "options": {"reference": "logprobs"}}  # a base loss has a value there
    term = TruncatedImportanceSampling(regularizer=base)
    loss, metrics = term.compute(data * 2, doubles([-1.0], [-1.0]))
    assert loss.item() == pytest.approx(math.log(2))
    metrics = {name: metrics[name] for name in ("ratio", "ratio_max", "clipped")}
    assert metrics == {"ratio": 0.0, "ratio_max": 0.0, "clipped": 0.0}


def test_it_runs_where_the_wrapped_term_runs() -> None:
    spec = RegularizerSpec(
        TruncatedImportanceSampling(regularizer=TopologicalConsistency(points=points)), 1.0
    )
    assert (spec.run_in, spec.gradient) == ("process", "autograd")


def test_adaptive_may_wrap_it() -> None:
    inner = TruncatedImportanceSampling(regularizer=OverlongPenalty(max_length=2, buffer=1))
    term = Adaptive(regularizer=inner, target=1.0, initial=3.0)
    loss, metrics = term.compute([plain(logprobs=[-1.0, -1.0])], doubles([-1.0, -1.0]))
    assert loss.item() == 3.0
    assert metrics["observed"] == 1.0


class Numerical:
    name = "numerical"
    gradient = "numerical"

    def compute(self, data: Any, logprobs: Any) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("inner", "rule"),
    [
        (
            WholeVocabulary(kind="entropy"),
            "a term over log-probs alone: the weights do not reach other inputs",
        ),
        (EMADrift(), "a term without state: wrap this one in it instead"),
        (Entropy(importance="logprobs"), "a term without importance weights of its own"),
        (
            TruncatedImportanceSampling(regularizer="l1"),
            "a term without importance weights of its own",
        ),
        (Numerical(), "a term with a gradient of its own or gradient='score'"),
    ],
)
def test_terms_that_cannot_be_weighted(inner: Any, rule: str) -> None:
    with pytest.raises(SpecError) as caught:
        TruncatedImportanceSampling(regularizer=inner)
    name = f"truncated_{inner.name}"
    assert str(caught.value) == (
        f"regularizer must be {rule}, got {inner!r} (regularizer {name!r})."
    )


def test_classes_are_no_sampled_tokens() -> None:
    term = TruncatedImportanceSampling(regularizer=L2())
    with pytest.raises(InputError, match=r"must have the shape \[T\], got \[1, 2\]"):
        term.compute([plain(logprobs=[-1.0])], doubles([[-1.0, -2.0]]))
