from __future__ import annotations

import warnings
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]  # SciPy has no types
import torch
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import SpecError
from steelyard.regularizers import DemographicParity, EqualizedOdds
from steelyard.regularizers.fairness import SmallBatchWarning

from .checks import assert_gradients, doubles, plain, tinkered, value_and_gradients

LOGPROBS = doubles([-0.5, -1.5], [-3.0], [-2.0], [-0.1, -0.2], [-4.0], [-1.0])
GROUPS = [0, 1, 0, 1, 2, 2]
LABELS = [0, 0, 1, 1, 0, 1]
OUTCOMES = [-1.0, -3.0, -2.0, -0.15, -4.0, -1.0]


def data(make: Any = plain) -> list[Any]:
    return [make(group=[g], label=[y]) for g, y in zip(GROUPS, LABELS, strict=True)]


def outcomes(rows: list[torch.Tensor], outcome: str) -> Any:
    means = np.array([row.mean().item() for row in rows])
    return np.exp(means) if outcome == "prob" else means


def gaps(rows: list[torch.Tensor], outcome: str, among: Any) -> list[float]:
    found, groups = outcomes(rows, outcome), np.array(GROUPS)
    means = [found[(groups == g) & among].mean() for g in (0, 1, 2)]
    return [abs(a - b) for a, b in combinations(means, 2)]


@pytest.mark.parametrize("outcome", ["logprob", "prob"])
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("make", [plain, tinkered])
def test_demographic_parity_by_hand(outcome: Any, power: Any, make: Any) -> None:
    def by_hand(rows: list[torch.Tensor]) -> float:
        return float(np.mean(np.array(gaps(rows, outcome, True)) ** power))

    term = DemographicParity(outcome=outcome, power=power, test="none")
    value, _ = value_and_gradients(term, data(make), LOGPROBS)
    assert value == pytest.approx(by_hand(LOGPROBS), rel=1e-12)
    assert_gradients(term, data(make), LOGPROBS, by_hand)


@pytest.mark.parametrize("outcome", ["logprob", "prob"])
@pytest.mark.parametrize("power", [1, 2])
def test_equalized_odds_by_hand(outcome: Any, power: Any) -> None:
    def by_hand(rows: list[torch.Tensor]) -> float:
        each = [gaps(rows, outcome, np.array(LABELS) == y) for y in (0, 1)]
        return float(np.mean(np.concatenate(each) ** power))

    term = EqualizedOdds(outcome=outcome, power=power, test="none")
    value, _ = value_and_gradients(term, data(), LOGPROBS)
    assert value == pytest.approx(by_hand(LOGPROBS), rel=1e-12)
    assert_gradients(term, data(), LOGPROBS, by_hand)


@pytest.mark.parametrize("outcome", ["logprob", "prob"])
@pytest.mark.parametrize("cls", [DemographicParity, EqualizedOdds])
def test_a_datum_without_a_token_is_left_out(cls: Any, outcome: Any) -> None:
    """Its log-prob would be 0, the best outcome there is."""
    term = cls(outcome=outcome, test="none")
    value, gradients = value_and_gradients(term, data(), LOGPROBS)
    masked = plain(group=[1], label=[0], weights=[0.0, 0.0])
    with_it, of_all = value_and_gradients(term, [*data(), masked], [*LOGPROBS, LOGPROBS[0]])
    assert with_it == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(of_all, [*gradients, torch.zeros_like(LOGPROBS[0])])


def test_a_single_group_has_no_gap_even_where_a_log_prob_is_infinite() -> None:
    term = DemographicParity(test="none")
    value, gradients = value_and_gradients(term, [plain(group=[0])], doubles([-np.inf, -1.0]))
    assert value == 0
    assert gradients[0].tolist() == [0.0, 0.0]


def test_metrics_of_demographic_parity() -> None:
    _, metrics = DemographicParity().compute(data(), LOGPROBS)
    samples = [[OUTCOMES[i] for i in range(6) if GROUPS[i] == g] for g in (0, 1, 2)]
    assert metrics == pytest.approx(
        {
            "mean/0": -1.5,
            "mean/1": -1.575,
            "mean/2": -2.5,
            "gap": 1.0,
            "groups": 3.0,
            "p_value": scipy.stats.kruskal(*samples).pvalue,
        }
    )
    _, metrics = DemographicParity(test="anova").compute(data(), LOGPROBS)
    assert metrics["p_value"] == pytest.approx(scipy.stats.f_oneway(*samples).pvalue)


def test_metrics_of_equalized_odds() -> None:
    _, metrics = EqualizedOdds().compute(data(), LOGPROBS)
    # One outcome for each group and label.
    p = [scipy.stats.kruskal([a], [b], [c]).pvalue for a, b, c in [(-1, -3, -4), (-2, -0.15, -1)]]
    assert metrics == pytest.approx(
        {
            "gap/0": 3.0,
            "gap/1": 1.85,
            "gap": 3.0,
            "p_value": scipy.stats.combine_pvalues(p).pvalue,
        }
    )


def test_the_p_value_detects_a_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = [plain(group=index % 2) for index in range(80)]
    same = [torch.randn(1, generator=generator) - 3 for _ in groups]
    shifted = [row - 2 * (index % 2) for index, row in enumerate(same)]
    for term in (DemographicParity(), DemographicParity(test="anova")):
        assert term.compute(groups, same)[1]["p_value"] > 0.05
        assert term.compute(groups, shifted)[1]["p_value"] < 1e-6


@pytest.mark.parametrize("test", ["kruskal", "anova"])
def test_undefined_tests_have_p_value_one(test: Any) -> None:
    groups = [plain(group=index % 2) for index in range(4)]
    _, metrics = DemographicParity(test=test).compute(groups, [torch.ones(1)] * 4)
    assert metrics["p_value"] == 1.0
    if test == "anova":
        _, metrics = DemographicParity(test=test).compute(groups[:2], doubles([-1.0], [-2.0]))
        assert metrics["p_value"] == 1.0


@pytest.mark.parametrize("term", [DemographicParity(), EqualizedOdds()])
def test_one_group_has_no_gap(term: Any) -> None:
    alone = [plain(group=1, label=index) for index in range(2)]
    value, gradients = value_and_gradients(term, alone, doubles([-1.0], [-2.0]))
    assert value == 0
    assert all(bool((row == 0).all()) for row in gradients)
    assert term.compute(alone, doubles([-1.0], [-2.0]))[1]["gap"] == 0


def population(groups: int = 2) -> list[torch.Tensor]:
    """Outcomes of a few data of each group, all that there are."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, generator=generator, dtype=torch.float64) - g for g in range(groups)]


def expected(term: Any, outcomes: list[torch.Tensor], size: int) -> tuple[float, torch.Tensor]:
    """Mean of value and gradient over all batches of `size` data of each group."""
    leaf = torch.cat(outcomes).requires_grad_()
    parts = leaf.chunk(len(outcomes))
    drawn = [list(product(part, repeat=size)) for part in parts]  # with replacement
    losses = []
    for batch in product(*drawn):
        rows = [row.reshape(1) for group in batch for row in group]
        labels = [plain(group=g, label=0) for g, group in enumerate(batch) for _ in group]
        losses.append(term.compute(labels, rows)[0])
    loss = torch.stack(losses).mean()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), gradient


@pytest.mark.parametrize("kind", [DemographicParity, EqualizedOdds])
@pytest.mark.parametrize("groups", [2, 3])
def test_unbiased_squared_gaps_are_those_of_the_population(kind: Any, groups: int) -> None:
    outcomes = population(groups)
    leaf = torch.cat(outcomes).requires_grad_()
    pairs = combinations(leaf.chunk(groups), 2)
    gap = torch.stack([(a.mean() - b.mean()) ** 2 for a, b in pairs]).mean()
    (gradient,) = torch.autograd.grad(gap, leaf)
    value, found = expected(kind(unbiased=True, test="none"), outcomes, 2)
    assert value == pytest.approx(gap.item(), rel=1e-12)
    assert torch.allclose(found, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_squared_gaps_of_batches_are_too_large_by_the_spread_within_groups(size: int) -> None:
    first, second = population()
    excess = (first.var(correction=0) + second.var(correction=0)).item() / size
    value, gradient = expected(DemographicParity(test="none"), [first, second], size)
    gap = (first.mean() - second.mean()).item()
    assert value == pytest.approx(gap**2 + excess, rel=1e-12)
    # Its gradient is that of the gap, and of the variances: it pulls outcomes to their mean.
    spread = torch.cat([first - first.mean(), second - second.mean()]) * 2 / 3 / size
    of_gap = torch.tensor([1.0] * 3 + [-1.0] * 3, dtype=torch.float64) * 2 * gap / 3
    assert torch.allclose(gradient, of_gap + spread, rtol=1e-10)


def test_unbiased_gaps_leave_out_groups_of_one_datum() -> None:
    term = DemographicParity(unbiased=True, test="none")
    groups = [plain(group=g) for g in (0, 0, 1)]
    value, gradients = value_and_gradients(term, groups, doubles([-1.0], [-2.0], [-9.0]))
    assert value == 0
    assert all(bool((row == 0).all()) for row in gradients)
    more = [plain(group=g) for g in (0, 0, 1, 1)]
    rows = doubles([-1.0], [-2.0], [-9.0], [-8.0])
    assert value_and_gradients(term, more, rows)[0] == pytest.approx(7.0**2 - 2 * 0.5 / 2)
    assert_gradients(
        term, more, rows, lambda x: float((x[0] + x[1] - x[2] - x[3]) ** 2 / 4
                                          - (x[0] - x[1]) ** 2 / 4 - (x[2] - x[3]) ** 2 / 4)
    )  # fmt: skip


def test_unbiased_is_for_squared_gaps() -> None:
    with pytest.raises(SpecError, match=r"unbiased must be False with power=1, got True"):
        EqualizedOdds(unbiased=True, power=1)
    with pytest.raises(SpecError, match=r"unbiased must be True or False, got 1"):
        DemographicParity(unbiased=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [DemographicParity, EqualizedOdds])
@pytest.mark.parametrize(
    ("counts", "warned"),
    [((2, 9), "2 of group 0, 9 of group 1"), ((9,), "9 of group 0"), ((8, 8), "")],
)  # fmt: skip
def test_a_small_batch_is_warned_of_once(kind: Any, counts: tuple[int, ...], warned: str) -> None:
    term = kind(test="none")
    batch = [plain(group=g, label=0) for g, count in enumerate(counts) for _ in range(count)]
    rows = [torch.tensor([-1.0])] * len(batch)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            term.compute(batch, rows)
    messages = [str(each.message) for each in seen]
    assert all(each.category is SmallBatchWarning for each in seen)
    if not warned:
        assert messages == []
    else:
        (message,) = messages
        assert message.startswith(f"a batch has few data of a group ({warned}): the gap between")
        assert "at least 8 data of each group" in message


def test_equalized_odds_ignore_differences_between_labels() -> None:
    fair = [plain(group=g, label=y) for g, y in [(0, 0), (1, 0), (0, 1)]]
    rows = doubles([-1.0], [-1.0], [-9.0])
    assert value_and_gradients(EqualizedOdds(), fair, rows)[0] == 0
    assert value_and_gradients(DemographicParity(), fair, rows)[0] == 16


def test_groups_may_have_names_or_come_from_a_function() -> None:
    named = [plain(group=name) for name in ("north", "south")]
    rows = doubles([-1.0], [-3.0])
    loss, metrics = DemographicParity().compute(named, rows)
    assert (loss.item(), metrics["mean/south"]) == (4.0, -3.0)
    term = DemographicParity(group=lambda datum, index: index % 2)
    assert term.compute([None, None], rows)[0].item() == 4.0


@given(st.permutations(range(6)), st.floats(-5, 0))
def test_order_and_a_common_shift_do_not_matter(order: list[int], shift: float) -> None:
    rows = [LOGPROBS[i] + shift for i in order]
    shuffled = [data()[i] for i in order]
    for term in (DemographicParity(test="none"), EqualizedOdds(test="none")):
        expected = term.compute(data(), LOGPROBS)[0].item()
        assert term.compute(shuffled, rows)[0].item() == pytest.approx(expected, rel=1e-9)
