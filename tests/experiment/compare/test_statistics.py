"""Means and differences over seeds, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]  # SciPy has no types

from steelyard.experiment.compare.statistics import (
    Comparison,
    Estimate,
    add_verdicts,
    compare,
    conclusions,
    estimate,
    holm,
    is_reward,
    reward_quantity,
    t_quantile,
)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_quantiles_are_those_of_scipy(confidence: float) -> None:
    for degrees in (*range(1, 31), 100, 101):
        expected = stats.t.ppf((1 + confidence) / 2, degrees)
        assert t_quantile(degrees, confidence) == pytest.approx(expected, rel=1e-10)


@given(st.lists(st.floats(-1e3, 1e3).filter(lambda x: abs(x) > 1e-3), min_size=2, max_size=8))
def test_the_interval_is_that_of_a_t_test(values: list[float]) -> None:
    found = estimate(values)
    assert found is not None
    assert found.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9)
    margin = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    assert found.margin == pytest.approx(margin, rel=1e-9, abs=1e-9)


def test_the_interval_covers_the_mean_in_95_of_100_samples() -> None:
    generator = np.random.default_rng(0)
    estimates = [estimate(generator.normal(3.0, 2.0, 3).tolist()) for _ in range(4000)]
    covered = [abs(each.mean - 3.0) <= (each.margin or 0.0) for each in estimates if each]
    assert len(covered) == 4000
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_there_is_no_estimate_without_finite_values(values: Sequence[float]) -> None:
    assert estimate(values) is None


def test_one_value_has_no_interval_and_no_verdict() -> None:
    found = compare({0: 3.0}, {0: 1.0})
    assert found == Comparison(Estimate(3.0, None, 1), Estimate(2.0, None, 1))
    assert found.difference is not None
    assert found.difference.p_value is None
    assert found.difference.seeds_to_resolve(0.05) is None
    assert judged(found).verdict is None


def judged(*comparisons: Comparison) -> Comparison:
    """The first of these comparisons, tested together with the others."""
    effects = {f"without {n}": {"held-out loss": each} for n, each in enumerate(comparisons)}
    return add_verdicts(effects)["without 0"]["held-out loss"]


def test_pairs_cancel_what_differs_between_seeds() -> None:
    full = {0: 1.0, 1: 5.0, 2: 9.0}
    paired = compare({0: 1.2, 1: 5.21, 2: 9.19}, full)
    assert judged(paired).verdict == "higher"
    assert judged(compare({0: 0.8, 1: 4.79, 2: 8.81}, full)).verdict == "lower"
    assert judged(compare({0: 1.3, 1: 4.6, 2: 9.5}, full)).verdict == "not resolved"
    assert paired.value is not None
    assert paired.value.margin == pytest.approx(9.9, abs=0.1), "unpaired, nothing would be seen"


def test_only_seeds_that_both_runs_have_are_paired() -> None:
    found = compare({0: 2.0, 1: 3.0, 2: None}, {0: 1.0, 2: 7.0})
    assert found.value is not None
    assert found.value.count == 2
    assert found.difference == Estimate(1.0, None, 1)
    assert compare({0: 2.0}, {1: 1.0}).difference is None
    assert compare({0: None}, {0: 1.0}) == Comparison(None, None)


def test_a_run_without_any_difference_has_no_visible_comparison() -> None:
    same = judged(compare({0: 2.0, 1: 3.0}, {0: 2.0, 1: 3.0}))
    assert (same.verdict, same.p_value, same.seeds_to_resolve) == ("not resolved", 1.0, None)
    assert judged(compare({0: 2.5, 1: 3.5}, {0: 2.0, 1: 3.0})).p_value == 0.0


def comparison(*differences: float) -> Comparison:
    return Comparison(estimate([1.0 for _ in differences]), estimate(differences))


def test_conclusions_are_about_the_loss_and_the_term_left_out() -> None:
    effects = {
        "all": {name: Comparison(estimate([1.0, 1.0])) for name in ("held-out loss", "kl", "l2")},
        "without kl": {
            "held-out loss": comparison(-0.3, -0.302),
            "kl": comparison(2.0, 2.2),
            "l2": comparison(5.0, 5.0),
        },
        "none": {
            "held-out loss": comparison(-1.0, 1.0),
            "kl": comparison(1.0, 1.0),
            "l2": comparison(1.0, 1.0),
        },
    }  # fmt: skip
    first, second, note = conclusions(effects)
    assert first == (
        "without kl: held-out loss lower by 0.3 ± 0.013; kl not resolved with 2 seeds "
        "(+2.1 ± 1.3; about 3 seeds would)."
    )
    assert second == "none: held-out loss not resolved with 2 seeds (+0 ± 13)."
    assert "means of 2 seeds, paired by seed, with the 95 % interval" in note
    assert "for all 3 comparisons of this table together" in note
    marked = add_verdicts(effects)
    assert marked["without kl"]["l2"].verdict is None, "shown, but not tested"
    assert marked["all"] == effects["all"]


def test_with_one_term_the_run_without_any_says_what_the_term_did() -> None:
    own = {"held-out loss": comparison(1.0, 1.1, 1.05), "kl": comparison(2.0, 2.1, 2.05)}
    sentence, _ = conclusions({"none": own})
    assert sentence.startswith("none: held-out loss higher by 1.1 ± 0.12; kl higher by 2")


LOSSES = [2.5, 2.6, 2.4]


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        (
            [2.8, 2.91, 2.69],
            (
                "The terms lowered the held-out loss by 0.3 ± 0.025: 2.5 with the terms, "
                "2.8 without, means of 3 seeds."
            ),
        ),
        (
            [2.2, 2.31, 2.09],
            (
                "The terms raised the held-out loss by 0.3 ± 0.025: 2.5 with the terms, "
                "2.2 without, means of 3 seeds."
            ),
        ),
        (
            [2.8, 2.3, 2.6],
            (
                "The held-out loss is 2.5 with the terms, 2.567 without: not resolved with 3 seeds "
                "(-0.067 ± 0.8; about 92 seeds would)."
            ),
        ),
        (
            [2.8],
            (
                "The held-out loss is 2.5 with the terms, 2.8 without: not resolved with one seed "
                "(--seeds 3 adds two)."
            ),
        ),
    ],
)
def test_runs_with_all_terms_and_none_are_compared_by_their_goal_and_their_terms(
    without: list[float], sentence: str
) -> None:
    full, other = dict(enumerate(LOSSES[: len(without)])), dict(enumerate(without))
    effects = {
        "all": {"held-out loss": compare(full, None), "a": compare({0: 1.0}, None)},
        "none": {"held-out loss": compare(other, full), "a": compare({0: 2.0}, {0: 1.0})},
    }
    for own in effects.values():
        own["b"] = own["a"]
    first, note = conclusions(effects)
    assert first == (
        f"{sentence} On held-out data a is 1 with the terms, 2 without; b is 1 with the terms, "
        f"2 without."
    )
    assert "there is no verdict" in note or "for all 1 comparisons" in note


def test_a_single_term_is_judged_beside_what_it_changed() -> None:
    full = {"held-out reward": {0: 1.0, 1: 1.1}, "kl": {0: 0.1, 1: 0.1}}
    other = {"held-out reward": {0: 0.5, 1: 0.6}, "kl": {0: 1.1, 1: 1.1}}
    effects = {
        "all": {name: compare(values, None) for name, values in full.items()},
        "none": {name: compare(values, full[name]) for name, values in other.items()},
    }
    first, second, _ = conclusions(effects)
    assert first.startswith("The terms raised the held-out reward by 0.5 ± ")
    assert second == "none: kl higher by 1 ± 0."


def test_a_loss_that_was_not_measured_gives_no_numbers() -> None:
    own = {"held-out loss": compare({0: None}, {0: None}), "kl": compare({0: 2.0}, {0: 1.0})}
    first, _ = conclusions({"all": own, "none": own})
    assert first == (
        "The held-out loss was not measured with and without the terms. On held-out data kl is 2 "
        "with the terms, 2 without."
    )


def test_one_seed_has_no_verdict_and_the_sentence_says_how_to_get_one() -> None:
    (sentence,) = conclusions({"without kl": {"held-out loss": comparison(-0.3)}})
    assert "there is no verdict: --seeds 3 adds runs with two more seeds" in sentence
    assert conclusions({}) == []


def test_conclusions_are_about_the_reward_and_the_reward_left_out() -> None:
    own = {
        "held-out reward": comparison(-1.0, -1.1, -0.9),
        "reward short": comparison(-2.0, -2.0, -2.0),
        "reward kind": comparison(3.0, 3.0, 3.0),
        "kl": comparison(0.0, 0.5, -0.5),
    }
    found = conclusions({"without reward short": own, "none": own})
    assert found[0] == (
        "without reward short: held-out reward lower by 1 ± 0.25; reward short lower by 2 ± 0."
    )
    assert found[1] == (
        "none: held-out reward lower by 1 ± 0.25; kl not resolved with 3 seeds (+0 ± 1.2)."
    )


def test_rewards_are_told_from_terms() -> None:
    assert is_reward("held-out reward")
    assert is_reward(reward_quantity("short"))
    assert not is_reward("short")
    assert not is_reward("held-out loss")


@given(
    st.lists(
        st.lists(st.floats(-10, 10), min_size=3, max_size=3).filter(lambda x: np.std(x) > 1e-3),
        min_size=1,
        max_size=12,
    )
)
def test_the_p_values_are_those_of_scipy_adjusted_by_holm(rows: list[list[float]]) -> None:
    full = [3.0, -1.0, 2.0]
    effects = {
        f"without {n}": {
            "held-out loss": compare(
                {seed: base + x for seed, (base, x) in enumerate(zip(full, row, strict=True))},
                dict(enumerate(full)),
            )
        }
        for n, row in enumerate(rows)
    }
    raw = [stats.ttest_rel([b + x for b, x in zip(full, row)], full).pvalue for row in rows]  # noqa: B905 - equal
    found = [each["held-out loss"].p_value for each in add_verdicts(effects).values()]
    # By the definition: the largest of the k-th smallest p times the number of those not below it.
    ordered = sorted(raw)
    expected = [
        min(1.0, max((len(raw) - k) * q for k, q in enumerate(ordered) if q <= p)) for p in raw
    ]
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_holm_by_hand() -> None:
    # The example of Holm's procedure: 4 × 0.005, 3 × 0.011, 2 × 0.02, 1 × 0.04, never falling.
    assert holm([0.02, 0.005, 0.04, 0.011]) == pytest.approx([0.04, 0.02, 0.04, 0.033])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def null_table(generator: np.random.Generator) -> dict[str, dict[str, Comparison]]:
    """Effects of an ablation of five terms with three seeds in which no term does anything."""
    names = [f"t{n}" for n in range(5)]
    runs = ["all", *(f"without {name}" for name in names), "none"]
    quantities = ["held-out loss", *names]
    of_seed = generator.normal(size=(len(quantities), 3))  # what the runs of a seed share
    values = of_seed + generator.normal(size=(len(runs), len(quantities), 3))
    by_seed = [[dict(enumerate(cell)) for cell in row] for row in values.tolist()]
    return {
        run: {
            name: compare(by_seed[i][j], None if run == "all" else by_seed[0][j])
            for j, name in enumerate(quantities)
        }
        for i, run in enumerate(runs)
    }


def test_a_table_without_any_effect_has_a_verdict_in_one_of_twenty_cases() -> None:
    generator = np.random.default_rng(0)
    tables = [null_table(generator) for _ in range(600)]
    wrong = [
        any(" higher by " in line or " lower by " in line for line in conclusions(effects))
        for effects in tables
    ]
    assert np.mean(wrong) <= 0.07, "with intervals alone it is 0.38"
    marked = [add_verdicts(effects) for effects in tables]
    starred = [any(c.is_resolved for own in each.values() for c in own.values()) for each in marked]
    assert starred == wrong


@pytest.mark.parametrize("differences", [(1.0, 2.0, 3.0), (4.8, 0.4, 9.2), (1.0, 0.1, 0.3)])
@pytest.mark.parametrize("level", [0.05, 0.05 / 11])
def test_so_many_seeds_would_resolve_a_difference(
    differences: tuple[float, ...], level: float
) -> None:
    found = estimate(differences)
    assert found is not None
    count = found.seeds_to_resolve(level)
    assert count is not None

    def p(n: int) -> float:
        t = np.mean(differences) / (np.std(differences, ddof=1) / math.sqrt(n))
        return float(2 * stats.t.sf(t, n - 1))

    assert p(count) <= level < p(count - 1)


def test_a_difference_that_rose_with_each_seed_is_not_called_nothing() -> None:
    # As in a run with three seeds: +4.8 ± 5.7.
    effects = {"without kl": {"held-out loss": comparison(2.6, 4.6, 7.2)}}
    sentence, _ = conclusions(effects)
    assert sentence == (
        "without kl: held-out loss not resolved with 3 seeds (+4.8 ± 5.7; about 4 seeds would)."
    )
    noise = {"without kl": {"held-out loss": comparison(1.0, -1.0, 0.001)}}
    assert conclusions(noise)[0].endswith("(+0.00033 ± 2.5; more than 100 seeds would).")
