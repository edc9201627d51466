"""Means and differences over seeds, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]  # SciPy has no types

from steelyard.experiment.paired_differences import (
    Comparison,
    Estimate,
    compare,
    conclusions,
    estimate,
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
    assert found.verdict is None
    assert found.difference is not None
    assert found.difference.differs_from_zero is None


def test_pairs_cancel_what_differs_between_seeds() -> None:
    full = {0: 1.0, 1: 5.0, 2: 9.0}
    paired = compare({0: 1.2, 1: 5.21, 2: 9.19}, full)
    assert paired.verdict == "higher"
    assert compare({0: 0.8, 1: 4.79, 2: 8.81}, full).verdict == "lower"
    assert compare({0: 1.3, 1: 4.6, 2: 9.5}, full).verdict == "no visible effect"
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
    assert compare({0: 2.0, 1: 3.0}, {0: 2.0, 1: 3.0}).verdict == "no visible effect"


def comparison(*differences: float) -> Comparison:
    return Comparison(estimate([1.0 for _ in differences]), estimate(differences))


def test_conclusions_are_about_the_loss_and_the_term_left_out() -> None:
    effects = {
        "all": {name: Comparison(estimate([1.0, 1.0])) for name in ("held-out loss", "kl", "l2")},
        "without kl": {
            "held-out loss": comparison(-0.3, -0.31),
            "kl": comparison(2.0, 2.1),
            "l2": comparison(5.0, 5.0),
        },
        "none": {
            "held-out loss": comparison(-1.0, 1.0),
            "kl": comparison(1.0, 1.0),
            "l2": comparison(1.0, 1.0),
        },
    }  # fmt: skip
    first, second, note = conclusions(effects)
    assert first == "without kl: held-out loss lower by 0.3 ± 0.064; kl higher by 2 ± 0.64."
    assert second == "none: no visible effect on held-out loss (+0 ± 13)."
    assert "means of 2 seeds, paired by seed, with the 95 % interval" in note


def test_with_one_term_the_run_without_any_says_what_the_term_did() -> None:
    own = {"held-out loss": comparison(1.0, 1.1), "kl": comparison(2.0, 2.1)}
    sentence, _ = conclusions({"none": own})
    assert sentence.startswith("none: held-out loss higher by 1.1 ± 0.64; kl higher by 2")


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
        "none: held-out reward lower by 1 ± 0.25; no visible effect on kl (+0 ± 1.2)."
    )


def test_rewards_are_told_from_terms() -> None:
    assert is_reward("held-out reward")
    assert is_reward(reward_quantity("short"))
    assert not is_reward("short")
    assert not is_reward("held-out loss")
