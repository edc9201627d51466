"""Training with each regularizer changes the quantity that it penalises by a clear margin."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from steelyard import RegularizerSpec
from steelyard.regularizers import (
    DPO,
    L1,
    L2,
    Adaptive,
    ChosenNLL,
    ConfidencePenalty,
    Consistency,
    DemographicParity,
    ElasticNet,
    EMADrift,
    Entropy,
    EqualizedOdds,
    ExternalValidation,
    JSToReference,
    KLToReference,
    LogicalConsistency,
    OverlongPenalty,
    RelativeLength,
    SquaredLogRatio,
    TopologicalConsistency,
    TruncatedImportanceSampling,
    WholeVocabulary,
)

from .http_server import Server
from .training import (
    Trained,
    entropy,
    first_class,
    held,
    kl,
    next_tokens,
    nll,
    policy_gradient,
    sequence,
    train,
)
from .worker_functions import ascending, points_field, windows

SEQUENCES = [
    [1, 2, 3, 4, 5, 6],
    [7, 8, 9, 10, 11, 12],
    [13, 14, 15, 16, 17, 18],
    [19, 20, 21, 22, 23, 24],
]
PLACES = [
    [-1.0, -2.0, -3.0, -4.0, -5.0],
    [-5.0, -4.0, -1.0, -2.0, -3.0],
    [-3.0] * 5,
    [-2.0, -6.0, -2.0, -6.0, -2.0],
]
HELD = [sequence(s, held=torch.tensor(p)) for s, p in zip(SEQUENCES, PLACES, strict=True)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the model is too small for more, which would wait on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flat(trained: Trained, data: Any) -> torch.Tensor:
    return torch.cat([row.reshape(-1) for row in trained.logprobs(data)])


def means(trained: Trained, data: Any) -> torch.Tensor:
    return torch.stack([row.mean() for row in trained.logprobs(data)])


@cache
def held_alone() -> Trained:
    """Model trained to hold the log-probs at given values, without a term."""
    return train(HELD, held)


def term(regularizer: Any, weight: float, **fields: Any) -> RegularizerSpec:
    return RegularizerSpec(regularizer, weight, "term", **fields)


# Sparsity: the measure falls, while the base loss holds the log-probs at given values.


@pytest.mark.parametrize(
    ("regularizer", "weight", "size"),
    [
        (L1(), 3.0, lambda lp: lp.abs()),
        (L2(), 1.0, lambda lp: lp**2),
        (ElasticNet(), 1.0, lambda lp: 0.5 * lp.abs() + 0.5 * lp**2),
        (L1(of="probs"), 10.0, lambda lp: lp.exp()),
        (L2(of="probs"), 10.0, lambda lp: lp.exp() ** 2),
        (L2(center="mean"), 2.0, lambda lp: (lp - lp.mean()) ** 2),
    ],
    ids=["l1", "l2", "elastic_net", "l1 of probs", "l2 of probs", "l2 around the mean"],
)
def test_sparsity_shrinks_its_measure(regularizer: Any, weight: float, size: Any) -> None:
    without = size(flat(held_alone(), HELD)).mean()
    with_it = size(flat(train(HELD, held, [term(regularizer, weight)]), HELD)).mean()
    assert with_it < 0.8 * without


# Entropy: a policy gradient that rewards one token, on tokens sampled from the model.


PROMPT = [3, 0]  # the second is not read


def on_policy(trained: Trained, generator: torch.Generator) -> list[Any]:
    probabilities = next_tokens(trained, PROMPT)[0].exp()
    tokens = torch.multinomial(probabilities, 32, replacement=True, generator=generator)
    gains = (tokens < 100).float()
    gains -= gains.mean()
    return [
        sequence([3, int(token)], advantages=gain[None])
        for token, gain in zip(tokens, gains, strict=True)
    ]


def entropy_with(*specs: RegularizerSpec, steps: int = 24) -> float:
    return entropy(train(on_policy, policy_gradient, specs, steps=steps), PROMPT)


def test_a_bonus_raises_entropy_and_a_penalty_lowers_it() -> None:
    without = entropy_with()
    assert entropy_with(term(Entropy(mode="bonus"), 0.5)) > without + 1.0
    assert entropy_with(term(ConfidencePenalty(threshold=5.9), 1.0)) > without + 1.0
    # A sampled penalty takes 30 to 50 steps, by the luck of the draw, to settle on one token.
    lowered = entropy_with(term(Entropy(mode="penalty"), 0.5), steps=60)
    assert lowered < without - 1.0


class Stale:
    """Tokens sampled from the model of up to seven steps before, with their log-probs."""

    def __init__(self) -> None:
        self._calls, self._data = 0, []  # type: tuple[int, list[Any]]

    def __call__(self, trained: Trained, generator: torch.Generator) -> list[Any]:
        if self._calls % 8 == 0:
            fresh = on_policy(trained, generator)
            sampled = trained.logprobs(fresh)
            self._data = [
                sequence(
                    [3, int(datum.loss_fn_inputs["target_tokens"].data[0])],
                    advantages=datum.loss_fn_inputs["advantages"].to_torch(),
                    logprobs=row,
                    reference_logprobs=row,
                )
                for datum, row in zip(fresh, sampled, strict=True)
            ]
        self._calls += 1
        return self._data


def test_with_importance_a_bonus_raises_entropy_off_policy() -> None:
    base = TruncatedImportanceSampling(regularizer=policy_gradient)
    bonus = Entropy(mode="bonus", importance="logprobs")
    truncated = TruncatedImportanceSampling(regularizer=Entropy(mode="bonus"))

    def entropy_off_policy(*specs: RegularizerSpec) -> float:
        return entropy(train(Stale(), base, specs, steps=24), PROMPT)

    without = entropy_off_policy()
    assert entropy_off_policy(term(bonus, 1.0)) > without + 1.0
    assert entropy_off_policy(term(truncated, 1.0)) > without + 1.0


def test_with_importance_kl_holds_the_policy_of_the_samples() -> None:
    began = Trained()

    def drift(*specs: RegularizerSpec) -> float:
        trained = train(Stale(), policy_gradient, specs, steps=8)  # one batch of samples
        return kl(trained, began, PROMPT)

    term_of_kl = KLToReference(estimator="k3", importance="logprobs")
    assert drift(term(term_of_kl, 2.0)) < 0.6 * drift()


def test_entropy_of_classes() -> None:
    data = [sequence(PROMPT, target_tokens=[list(range(500))])]

    def entropy_of(first: float, *specs: RegularizerSpec) -> float:
        """Entropy after training that holds the first class at a log-prob."""

        def loss(_: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
            return (torch.cat(logprobs)[:, 0] - first).square().mean()

        return entropy(train(data, loss, specs), PROMPT)

    # A sharp distribution can gain entropy, a broad one can lose it.
    sharp, broad = entropy_of(-0.5), entropy_of(-1.5)
    assert entropy_of(-0.5, term(Entropy(mode="bonus"), 1.0)) > sharp + 0.4
    assert entropy_of(-1.5, term(Entropy(mode="penalty"), 1.0)) < broad - 0.4
    assert entropy_of(-0.5, term(ConfidencePenalty(threshold=6.0), 1.0)) > sharp + 0.4


@pytest.mark.parametrize("of", ["logits", "projection"])
def test_entropy_of_the_whole_vocabulary(of: Any) -> None:
    def mean_entropy(trained: Trained) -> float:
        return sum(entropy(trained, tokens) for tokens in SEQUENCES) / len(SEQUENCES)

    without = mean_entropy(held_alone())
    bonus = WholeVocabulary(kind="entropy", of=of, options={"mode": "bonus"})
    penalty = WholeVocabulary(kind="entropy", of=of)
    assert mean_entropy(train(HELD, held, [term(bonus, 1.0)])) > without + 0.4
    assert mean_entropy(train(HELD, held, [term(penalty, 1.0)])) < without - 0.4


# Reference: maximum likelihood moves the model away from its initial state.


@cache
def referenced() -> list[Any]:
    data = [sequence(s) for s in SEQUENCES]
    began = Trained().logprobs(data)
    return [sequence(s, reference_logprobs=row) for s, row in zip(SEQUENCES, began, strict=True)]


@cache
def likeliest(*tokens: tuple[int, ...]) -> Trained:
    """Model trained by maximum likelihood alone, which reads nothing but the tokens."""
    return train([sequence(each) for each in tokens], nll)


def distance(trained: Trained) -> float:
    """KL divergence from the initial model, over all tokens of the data."""
    began = Trained()
    return sum(kl(trained, began, tokens) for tokens in SEQUENCES) / len(SEQUENCES)


@cache
def distance_of_likeliest() -> float:
    return distance(likeliest(*map(tuple, SEQUENCES)))


@pytest.mark.parametrize(
    ("regularizer", "weight"),
    [
        (KLToReference(), 1.0),
        (KLToReference(estimator="k3"), 3.0),
        (JSToReference(), 6.0),
        (SquaredLogRatio(), 0.5),
    ],
    ids=["k2", "k3", "js", "squared log-ratio"],
)
def test_divergence_from_the_reference_is_smaller(regularizer: Any, weight: float) -> None:
    with_it = train(referenced(), nll, [term(regularizer, weight)])
    assert distance(with_it) < 0.5 * distance_of_likeliest()


def test_divergence_from_the_reference_is_smaller_by_classes() -> None:
    listed = [[[token, *range(100, 400)] for token in s[1:]] for s in SEQUENCES]
    bare = [sequence(s, target_tokens=k) for s, k in zip(SEQUENCES, listed, strict=True)]
    data = [
        sequence(s, target_tokens=k, reference_logprobs=row)
        for s, k, row in zip(SEQUENCES, listed, Trained().logprobs(bare), strict=True)
    ]
    without = distance(train(data, first_class))
    for spec in (term(KLToReference(), 1.0), term(JSToReference(), 8.0)):
        assert distance(train(data, first_class, [spec])) < 0.5 * without


@pytest.mark.parametrize("metric", ["mse", "l1"])
def test_consistency_brings_pairs_together(metric: Any) -> None:
    def gap(trained: Trained) -> float:
        a, b, c, d = trained.logprobs(HELD)
        return float(torch.cat([a - b, c - d]).abs().mean())

    with_it = train(HELD, held, [term(Consistency(metric=metric), 2.0)])
    assert gap(with_it) < 0.6 * gap(held_alone())


# Topology.


def test_persistence_of_the_log_probs_falls() -> None:
    shape = TopologicalConsistency(points=windows, dimensions=0)

    def persistence(trained: Trained) -> float:
        return float(shape.compute(HELD, trained.logprobs(HELD))[0])

    with_it = train(HELD, held, [term(shape, 1.0, run_in="inline")])
    assert persistence(with_it) < 0.6 * persistence(held_alone())


def test_data_with_large_persistence_become_less_likely() -> None:
    spread = [torch.eye(4) * size for size in (0.1, 0.1, 3.0, 3.0)]
    data = [sequence(s, points=p) for s, p in zip(SEQUENCES, spread, strict=True)]
    shape = TopologicalConsistency(points=points_field, dimensions=0, differentiable=False)
    assert_less_likely(data, [2, 3], shape, 0.1, run_in="inline")


def tokens_of(datum: Any) -> tuple[int, ...]:
    return (*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"].data[-1]))


def assert_less_likely(
    data: Any, worse: list[int], regularizer: Any, weight: float, run_in: Any = "auto"
) -> None:
    """Check that the `worse` data become less likely than the rest only with the term."""
    better = [index for index in range(len(data)) if index not in worse]

    def lead(trained: Trained) -> float:
        found = means(trained, data)
        return float(found[better].mean() - found[worse].mean())

    without = lead(likeliest(*map(tokens_of, data)))
    with_it = lead(train(data, nll, [term(regularizer, weight, run_in=run_in)]))
    assert abs(without) < 1.0
    assert with_it > without + 1.0


def test_long_answers_become_less_likely() -> None:
    data = [
        sequence(s[:length], group=[0]) for s, length in zip(SEQUENCES, (3, 3, 6, 6), strict=True)
    ]
    assert_less_likely(data, [2, 3], OverlongPenalty(max_length=5, buffer=4), 2.0)
    assert_less_likely(data, [2, 3], RelativeLength(), 2.0)


# Fairness.

GROUPED = [
    sequence(s, held=torch.tensor([place] * 5), group=[group], label=[label])
    for s, place, group, label in zip(
        SEQUENCES, (-1.0, -4.0, -2.0, -6.0), (0, 1, 0, 1), (0, 0, 1, 1), strict=True
    )
]


@cache
def grouped_alone() -> Trained:
    return train(GROUPED, held)


@pytest.mark.parametrize("outcome", ["logprob", "prob"])
@pytest.mark.parametrize("cls", [DemographicParity, EqualizedOdds])
def test_the_gap_between_groups_is_smaller(cls: Any, outcome: Any) -> None:
    fair = cls(outcome=outcome)

    def gap(trained: Trained) -> float:
        found = trained.logprobs(GROUPED)
        return float(fair.compute(GROUPED, found)[1]["gap"])

    weight = 2.0 if outcome == "logprob" else 100.0
    with_it = train(GROUPED, held, [term(fair, weight)])
    assert gap(with_it) < 0.6 * gap(grouped_alone())


def test_the_difference_between_groups_is_no_longer_significant() -> None:
    many = [
        sequence([a, b], held=torch.tensor([-1.0 if a % 2 else -4.0]), group=[a % 2])
        for a, b in zip(range(24), range(1, 25), strict=True)
    ]
    fair = DemographicParity()

    def p_value(trained: Trained) -> float:
        return fair.compute(many, trained.logprobs(many))[1]["p_value"]

    # Equal groups have any p-value with equal chance, so a level of 0.05 would fail at times.
    level = 0.001
    assert p_value(train(many, held)) < 0.1 * level
    assert p_value(train(many, held, [term(fair, 20.0)])) > level


# Verdicts.


def test_contradictory_data_become_less_likely() -> None:
    tokens = [SEQUENCES[0], SEQUENCES[1], [13, 17, 15, 16, 14, 18], [19, 24, 21, 22, 23, 20]]
    logic = LogicalConsistency(constraints=ascending)
    assert_less_likely([sequence(s) for s in tokens], [2, 3], logic, 0.5, run_in="inline")


def test_data_that_the_validator_penalises_become_less_likely() -> None:
    def payload(datum: Any, index: int) -> Any:
        return {"penalty": float(datum.model_input.to_ints()[0] > 10)}

    data = [sequence(s) for s in SEQUENCES]
    with Server() as server:
        judge = ExternalValidation(url=server.url("check"), payload=payload)
        assert_less_likely(data, [2, 3], judge, 0.5)
        judge.close()
        assert server.connections <= 4


# Regularizers with state.


def test_ema_drift_slows_the_mean_log_prob() -> None:
    data = [sequence(s) for s in SEQUENCES]
    began = flat(Trained(), data).mean()
    without = flat(train(data, nll, steps=20), data).mean() - began
    slow = [term(EMADrift(decay=0.99), 10.0)]
    assert flat(train(data, nll, slow, steps=20), data).mean() - began < 0.5 * without


def test_adaptive_holds_its_target() -> None:
    values: list[float] = []

    def recorded(data: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
        loss, _ = KLToReference().compute(data, logprobs)
        values.append(loss.item())
        return loss

    def typical(fn: Any, weight: float, steps: int) -> float:
        """Median of the divergence over the last half of the steps.

        The multiplier follows the divergence with a lag, so the divergence swings around its
        target between a tenth and three times of it, and any single step may lie anywhere there.
        """
        values.clear()
        train(referenced(), nll, [term(fn, weight)], steps=steps)
        return statistics.median(values[steps // 2 :])

    controller = Adaptive(regularizer=recorded, target=1.0, rate=0.5, initial=0.1)
    assert 0.5 < typical(controller, 1.0, steps=100) < 2.0
    assert typical(recorded, 0.1, steps=40) > 5.0


# Preference.


def test_dpo_and_its_stabilising_terms() -> None:
    data = referenced()

    def run(*specs: RegularizerSpec) -> tuple[float, float, float]:
        """The margin, how likely the chosen are, and how far all have moved."""
        trained = train(data, DPO(beta=0.1), specs)
        _, metrics = DPO(beta=0.1).compute(data, trained.logprobs(data))
        moved = flat(trained, data) - flat(Trained(), data)
        return metrics["margin"], float(means(trained, data)[::2].mean()), float(moved.abs().mean())

    margin, chosen, moved = run()
    assert margin > 1.0
    nll_margin, nll_chosen, _ = run(term(ChosenNLL(), 1.0))
    assert nll_chosen > chosen + 0.3
    assert nll_margin > 0.5
    near_margin, _, near_moved = run(term(SquaredLogRatio(), 0.2))
    assert near_moved < 0.7 * moved
    assert near_margin > 0.2
