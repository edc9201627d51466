"""Rules about terms: for each one rows in which it is true, and rows that only look like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steelyard.doctor.facts import Facts, RewardFacts, TermFacts

from .series import Row, answers_row, found, one, rules, term_row

KL = TermFacts("kl", "kl_to_reference", restraint=True, reduction="mean")
KL_BOUND = Facts(terms=(TermFacts("kl", "kl_to_reference", bound="at_most", restraint=True),))
OWN = Facts(terms=(TermFacts("own", weight=0.1),))


def bounded(values: list[float], multipliers: list[float] | None = None, **more: Any) -> list[Row]:
    weights = multipliers or [1.0 + 0.1 * step for step in range(len(values))]
    return [
        (term_row(value=value, weight=weight, **{"bound": 0.3, **more}))
        for value, weight in zip(values, weights, strict=True)
    ]


# Bound broken.


def test_a_bound_that_stays_broken_is_said_once_after_step_14() -> None:
    finding = one(bounded([0.2] * 10 + [0.45] * 20), KL_BOUND)
    assert (finding.rule, finding.subject, finding.severity) == (
        "bound broken",
        "regularizers/kl",
        "problem",
    )
    assert finding.step == 14
    assert finding.what == "regularizer 'kl' is beyond its bound of 0.3"
    assert finding.evidence == "0.45 at step 29, multiplier 3.4 → 3.9"
    assert finding.cure == "give it more steps, or a bound that can be met"


def test_the_tutorial_at_a_learning_rate_of_a_hundredth_is_said_within_its_eight_steps() -> None:
    values = [0.0, 3.4, 16.6, 32.0, 23.0, 24.0, 26.0, 79.0]
    rows = bounded(values, [0.0, 2320.0, *[2320.0] * 6], **{"optim/learning_rate": 0.01})
    finding = one(rows, KL_BOUND)
    assert (finding.rule, finding.step) == ("bound broken", 5)
    assert finding.cause == "one update moves it by up to 177 × its bound: the step is too large"
    assert finding.cure == (
        "divide the learning rate by 10 (from 0.01 to 0.001), or set grad_clip_norm"
    )


def test_a_multiplier_that_swings_is_not_falling() -> None:
    """smollm2-135m, answers of 8 tokens, a learning rate of 0.01."""
    values = [0.0, 2.61, 1.41, 1.6, 2.0, 2.51, 2.44, 4.67]
    rows = bounded(values, [0.0, 4.29, 1.61, 2.47, 3.6, 4.72, 4.85, 9.09])
    finding = one(rows, KL_BOUND)
    assert (finding.rule, finding.step) == ("bound broken", 6)
    assert finding.cause.startswith("one update moves it by up to")


def test_a_bound_that_is_broken_at_the_first_step_that_is_seen_has_no_history() -> None:
    finding = one(bounded([0.9] * 5), KL_BOUND, start=20)
    assert (finding.rule, finding.step) == ("bound broken", 24)


def test_a_jump_beyond_all_numbers_divides_the_learning_rate_by_ten() -> None:
    facts = Facts(terms=(TermFacts("kl", bound="at_most", scale=1e-300),))
    finding = one(bounded([1e10, 1e20] * 8), facts)
    assert finding.cause == "one update moves it by up to inf × its bound: the step is too large"
    assert finding.cure.startswith("divide the learning rate by 10")


def test_a_value_that_moves_away_while_its_multiplier_rises_has_the_wrong_direction() -> None:
    finding = one(bounded([0.3 + 0.03 * step for step in range(30)]), KL_BOUND)
    assert finding.cause.startswith("it moves away while the multiplier rises")
    assert finding.cure.startswith("check the sign of the term and of the bound")


def test_a_lower_bound_is_judged_from_its_own_side() -> None:
    rows = bounded([2.0 - 0.03 * step for step in range(30)], bound=2.0, lower=True)
    assert one(rows).cause == ""  # 0.15 in five steps is no move, measured against the bound of 2
    rows = bounded([2.0 - 0.1 * step for step in range(30)], bound=2.0, lower=True)
    assert one(rows).cause.startswith("it moves away")
    assert rules(bounded([2.1] * 30, bound=2.0, lower=True)) == []


def test_a_multiplier_at_its_limit_is_the_cause() -> None:
    finding = one(bounded([0.5] * 30, [30.0] * 30), KL_BOUND)
    assert finding.cause == "the multiplier no longer changes: it is at its limit"
    assert finding.cure == "take a bound that can be met, nearer to 0.5"


def test_a_bound_of_zero_is_measured_against_its_scale() -> None:
    rows = bounded([0.3] * 30, bound=0.0)
    scaled = Facts(terms=(TermFacts("kl", bound="at_most", scale=0.5),))
    assert rules(rows, scaled) == ["bound broken"]
    wide = Facts(terms=(TermFacts("kl", bound="at_most", scale=2.0),))
    assert rules(rows, wide) == []
    assert rules(rows) == []  # the scale is not known


@pytest.mark.parametrize(
    ("values", "multipliers"),
    [
        pytest.param([0.308] * 40, None, id="it holds, at 0.308 of 0.3"),
        pytest.param([0.2, 0.5, 0.25, 0.6] * 10, None, id="one noisy batch after the other"),
        pytest.param(
            [0.2] * 10 + [0.9 - 0.05 * step for step in range(11)],
            [1.0] * 10 + [5.0 * 0.8**step for step in range(11)],
            id="it comes back, and its multiplier falls",
        ),
        pytest.param([3.0] * 10 + [0.3] * 20, None, id="it begins beyond, and settles in time"),
        pytest.param([0.2] * 5 + [0.9] * 5 + [0.3] * 20, None, id="it overshoots early, not far"),
    ],
)
def test_a_bound_that_holds_is_silent(values: list[float], multipliers: list[float] | None) -> None:
    rows = bounded(values, multipliers, cosine=-0.95)
    assert rules(rows, KL_BOUND) == []


def test_a_broken_bound_ends_once_it_holds_for_five_steps() -> None:
    (finding,) = found(bounded([0.2] * 10 + [0.5] * 10 + [0.29] * 10), KL_BOUND)
    assert (finding.step, finding.ended) == (14, 24)
    assert (
        finding.text
        == "Over at step 24, since step 14: regularizer 'kl' is beyond its bound of 0.3."
    )


# No gradient.


def silent(value: float = 1.0, norm: float | None = 0.0, **more: Any) -> list[Row]:
    return [term_row("own", value=value, norm=norm, **more)] * 12


def test_a_term_without_a_gradient_is_said_five_steps_after_the_first_update() -> None:
    finding = one(silent(norm=None), OWN)
    assert (finding.rule, finding.step, finding.severity) == ("no gradient", 5, "problem")
    assert finding.evidence == "value 1, gradient norm missing at step 11"
    assert finding.cause == "its loss does not depend on the log-probs through torch"


def test_a_reference_that_is_the_model_itself_is_the_cause() -> None:
    facts = Facts(terms=(KL,))
    rows = [term_row(value=0.0, norm=0.0)] * 12
    assert one(rows, facts).cause == "its reference is the model itself"
    untracked = [term_row(value=0.0, base_norm=None)] * 12
    assert one(untracked, facts).evidence == "value 0, gradient norm 0 at step 11"


@pytest.mark.parametrize(("reference", "said"), [("logprobs", True), ("reference_logprobs", False)])
def test_the_log_probs_of_the_samples_are_no_reference_up_to_rounding(
    reference: str, said: bool
) -> None:
    facts = Facts(terms=(replace(KL, reference=reference),))
    rows = [term_row(value=1e-7, norm=1e-4) for _ in range(8)]
    assert ("no gradient" in rules(rows, facts)) is said


def test_a_divergence_that_is_0_by_construction_is_no_bound_that_holds() -> None:
    rows = bounded([0.0] * 8, [0.0] * 8)
    finding = one(rows, KL_BOUND)
    assert (finding.rule, finding.cause) == ("no gradient", "its reference is the model itself")
    assert (
        rules(bounded([0.0] * 8, [0.0] * 8), Facts(terms=(TermFacts("kl", bound="at_most"),))) == []
    )


def test_a_term_of_the_user_may_say_what_0_means() -> None:
    facts = Facts(terms=(TermFacts("kl", zero_means="it compares a file with itself"),))
    finding = one([term_row(value=0.0, norm=0.0) for _ in range(8)], facts)
    assert (finding.cause, finding.cure) == (
        "it compares a file with itself",
        "change what it compares, or take it off",
    )


def test_a_score_whose_penalties_are_equal_is_the_cause() -> None:
    facts = Facts(terms=(TermFacts("own", gradient="score"),))
    assert one(silent(), facts).cause.startswith("all data of a batch have the same penalty")


def test_a_term_without_a_known_value_has_no_gradient_either() -> None:
    rows = [row | {"regularizers/own/value": float("nan")} for row in silent()]
    (_, finding) = found(rows, OWN)
    assert finding.evidence.startswith("value unknown")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(silent(value=0.0), id="a constraint that is satisfied"),
        pytest.param(silent(weight=0.0), id="a weight of 0"),
        pytest.param(silent(bound=5.0, weight=0.0), id="a bound that is not active"),
        pytest.param(silent(base_norm=None), id="nothing is tracked"),
        pytest.param(silent(**{"optim/learning_rate": 0.0}), id="no update yet: warm-up"),
        pytest.param(silent()[:5], id="four steps after an update"),
        pytest.param([*silent()[:4], term_row("own")] * 3, id="it has one at times"),
        pytest.param([term_row("own")] * 12, id="it has one"),
        pytest.param([{"base_loss/grad_norm": 1.0}] * 12, id="not due"),
    ],
)
def test_a_gradient_that_is_rightly_zero_is_silent(rows: list[Row]) -> None:
    assert rules(rows, OWN) == []


def test_a_term_that_is_only_measured_is_silent() -> None:
    facts = Facts(terms=(TermFacts("own", gradient="none"),))
    assert rules(silent(norm=None), facts) == []


def test_a_norm_that_is_not_finite_is_another_rule() -> None:
    rows = [row | {"regularizers/own/grad_norm": float("nan")} for row in silent()]
    assert rules(rows, OWN) == ["not finite"]


def test_the_kl_of_a_model_that_has_moved_a_little_is_silent() -> None:
    rows = [term_row(value=0.0, base_norm=None)] + [term_row(value=1e-9, base_norm=None)] * 12
    assert rules(rows, Facts(terms=(KL,))) == []


def test_a_resumed_run_was_updated_before() -> None:
    assert one(silent(norm=None), OWN, start=100).step == 104


# A sum beside means.


def summed(weight: float = 0.1, **more: Any) -> Row:
    return term_row(weight=weight, tokens=192.0, norm=0.0, value=0.0, **more) | {
        "base_loss/value": 37.7
    }


SUM = Facts(
    terms=(TermFacts("kl", "kl_to_reference", 0.1, reduction="mean", restraint=True),),
    loss="cross_entropy",
    reduction="sum",
)


def test_a_sum_beside_a_mean_is_said_at_step_0_with_the_weight_that_is_as_much() -> None:
    finding = one([summed()], SUM)
    assert (finding.rule, finding.step, finding.severity) == ("sum beside means", 0, "warning")
    assert finding.evidence == (
        "a sum of 37.7 over 192 tokens, and regularizer 'kl' with weight 0.1"
    )
    assert finding.cure == (
        "set the weight to 19.2, which is as much as 0.1 beside a mean; or take the mean "
        "(reduction='mean' in a config)"
    )


def test_the_tokens_of_answers_are_counted_where_the_loss_counts_none() -> None:
    row = {"rollouts/answer_tokens": 40.0, **summed()}
    del row["tokens"], row["base_loss/value"]
    facts = Facts(terms=SUM.terms, loss="ppo", reduction="sum", batch_size=32)
    assert one([row], facts).evidence.startswith("a sum over 1280 tokens")
    assert rules([row], Facts(terms=SUM.terms, reduction="sum")) == []


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        pytest.param(summed(), Facts(terms=SUM.terms, reduction="mean"), id="a mean"),
        pytest.param(summed(), Facts(terms=SUM.terms), id="a reduction that is not known"),
        pytest.param(summed(19.2), SUM, id="a weight that counts the tokens"),
        pytest.param(summed(0.0), SUM, id="a weight of 0"),
        pytest.param(summed(bound=0.3), SUM, id="a bound, which knows the size of the base"),
        pytest.param(summed(), Facts(reduction="sum"), id="a term of one's own, maybe a sum"),
        pytest.param({"base_loss/value": 37.7}, SUM, id="no term"),
        pytest.param(
            term_row(weight=1.0, tokens=192.0, norm=0.2), SUM, id="a share that is noticed"
        ),
    ],
)
def test_a_sum_that_is_meant_is_silent(row: Row, facts: Facts) -> None:
    assert "sum beside means" not in rules([row], facts)


def test_the_weight_of_a_schedule_is_judged_when_it_stands_still() -> None:
    facts = Facts(terms=(TermFacts("kl", "kl_to_reference", reduction="mean"),), reduction="sum")
    assert rules([summed(5.0 * step / 4) for step in range(5)], facts) == []

    def rises(step: int) -> Row:
        row = term_row(weight=0.1 * min(step, 4) / 4, norm=0.01, value=0.02)
        return row | {"base_loss/value": 37.7, "tokens": 192.0}

    assert one([rises(step) for step in range(8)], facts).step == 5


# Batch too small.


def test_parity_in_batches_of_four_is_said_at_step_0() -> None:
    parity = TermFacts("parity", "demographic_parity", smallest_batch=16)
    finding = one([term_row("parity")], Facts(terms=(parity,), batch_size=4))
    assert (finding.rule, finding.step) == ("batch too small", 0)
    assert finding.evidence == "4 data in a call, at least 16 wanted"
    for facts, row in [
        (Facts(terms=(parity,), batch_size=16), term_row("parity")),
        (Facts(terms=(parity,)), term_row("parity")),
        (Facts(terms=(KL,), batch_size=4), term_row("kl")),
        (Facts(terms=(parity,), batch_size=4), term_row("parity", weight=0.0)),
    ]:
        assert rules([row], facts) == []


# No response.


def rising(slope: float = 0.05, norm: float = 8.0, **more: Any) -> list[Row]:
    noise = (0.01, -0.01, 0.02, -0.02)
    return [
        term_row("own", value=1 + slope * step + noise[step % 4], norm=norm, **more)
        for step in range(30)
    ]


def test_a_term_that_rises_with_a_large_share_does_not_respond() -> None:
    finding = one(rising(), OWN)
    assert (finding.rule, finding.step) == ("no response", 21)
    assert finding.what == "regularizer 'own' rises although it is trained to fall"
    assert finding.evidence.endswith("over 20 steps, with 44 % of the gradient at step 29")


def test_measured_updates_that_all_raise_it_say_so_earlier() -> None:
    rows = rising(0.0, **{"regularizers/own/progress": 0.001})
    finding = one(rows, OWN)
    assert finding.step == 9
    assert finding.evidence.startswith("each of the last 8 measured updates raised it")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(rising(-0.05), id="it falls"),
        pytest.param(rising(0.0), id="it stands, within its noise"),
        pytest.param(rising(0.05, norm=1.0), id="a small share"),
        pytest.param(rising(0.05, cosine=-0.9), id="the base loss opposes it"),
        pytest.param(rising(0.05, weight=0.0), id="a weight of 0"),
        pytest.param(rising(0.05)[:20], id="too few steps"),
        pytest.param(rising(0.0, **{"regularizers/own/progress": -0.001}), id="updates lower it"),
    ],
)
def test_a_term_that_is_held_up_by_others_is_silent(rows: list[Row]) -> None:
    assert "no response" not in rules(rows, OWN)


def test_a_restraint_may_rise() -> None:
    facts = Facts(terms=(TermFacts("own", restraint=True),))
    assert rules(rising(), facts) == []


# Dominates, fights.


def test_a_term_that_dominates_is_said_with_a_weight_that_does_not() -> None:
    finding = one([term_row("own", norm=90.0)] * 12, OWN)
    assert (finding.rule, finding.severity, finding.step) == ("dominates", "warning", 7)
    assert finding.evidence == "90 % of the sum of the norms at step 11"
    assert finding.cure == "lower its weight to 0.0048, which gives it 30 %"


def test_a_term_that_has_all_of_the_gradient_but_a_rest_dominates() -> None:
    rows = [term_row("own", norm=1e40)] * 12
    assert one(rows, OWN).cure == "lower its weight"


def test_a_term_that_cancels_a_third_of_the_base_gradient_fights_it() -> None:
    finding = one([term_row("own", norm=5.0, cosine=-0.9)] * 12, OWN)
    assert (finding.rule, finding.severity, finding.step) == ("fights the base loss", "warning", 7)
    assert finding.evidence == "cosine -0.90, cancels 45 % of its gradient at step 11"


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        pytest.param({"norm": 90.0, "cosine": -0.95}, TermFacts("own", restraint=True), id="KL"),
        pytest.param(
            {"norm": 90.0, "cosine": -0.95, "bound": 0.3, "value": 0.308},
            TermFacts("own", bound="at_most"),
            id="a KL bound that holds, at 0.308 of 0.3",
        ),
        pytest.param({"norm": 20.0, "cosine": -0.4}, TermFacts("own"), id="a cosine of -0.4"),
        pytest.param({"norm": 3.0, "cosine": -0.9}, TermFacts("own"), id="it cancels little"),
        pytest.param({"norm": 90.0, "cosine": -0.9, "weight": 0.0}, TermFacts("own"), id="off"),
        pytest.param({"norm": 90.0, "cosine": -0.9, "base_norm": None}, TermFacts("own"), id="?"),
        pytest.param({"norm": 90.0, "cosine": -0.9, "base_norm": 0.0}, TermFacts("own"), id="0"),
        pytest.param(
            {"norm": 90.0, "cosine": -0.9, "regularizers/own/grad_space": "logits"},
            TermFacts("own"),
            id="another space",
        ),
    ],
)
def test_a_term_that_does_its_job_neither_dominates_nor_fights(
    row: dict[str, Any], facts: TermFacts
) -> None:
    assert rules([term_row("own", **row)] * 30, Facts(terms=(facts,))) == []


def test_once_the_base_loss_has_nothing_left_to_learn_no_term_dominates() -> None:
    rows = [term_row("own", norm=1.0, base_norm=norm) for norm in (1.0, 0.9, 0.8)]
    assert rules([*rows, *[term_row("own", norm=1.0, base_norm=0.01)] * 30], OWN) == []


def test_an_aggregator_settles_conflicts() -> None:
    rows = [(term_row("own", norm=5.0, cosine=-0.9) | {"factors/base": 0.7})] * 12
    assert rules(rows, OWN) == []


def test_a_declared_space_counts_where_the_metrics_have_none() -> None:
    row = {
        key: value
        for key, value in term_row("own", norm=90.0).items()
        if not key.endswith("grad_space")
    }
    logits = (TermFacts("own", space="logits"),)
    assert rules([row] * 12, Facts(terms=logits)) == []
    assert rules([row] * 12, Facts(terms=logits, grad_space="parameters")) == ["dominates"]
    assert rules([row] * 12, OWN) == ["dominates"]


# A KL on the tokens of the base loss.

SUPERVISED = Facts(terms=(KL,), loss="cross_entropy", reduction="mean")


def balanced(
    steps: int = 12, *, cancelled: float = 0.95, end: float = 3.9, **settings: Any
) -> list[Row]:
    """A KL that comes to cancel so much of the base gradient, while the loss falls from 4.6."""
    rows = []
    for step in range(steps):
        at = step / (steps - 1)
        row = term_row(
            value=0.3 * at,
            weight=1.0,
            norm=cancelled * at,
            cosine=-1.0 if step else 0.0,
            **settings,
        )
        rows.append(row | {"base_loss/value": 4.6 + at * (end - 4.6)})
    return rows


def test_a_kl_on_the_tokens_of_the_base_loss_is_a_brake() -> None:
    finding = one([*balanced(), *balanced()[-1:] * 8], SUPERVISED)
    assert (finding.rule, finding.severity) == ("brakes the base loss", "information")
    assert finding.step == 12, "the fifth step above two thirds"
    assert finding.text == (
        "Regularizer 'kl' holds the base loss back: both are measured on the same tokens; cancels "
        "95 % of the gradient of the base loss; the base loss went from 4.6 to 3.9 nats a token by "
        "step 19. A token that gains a nat moves its log-prob away from the reference by as much. "
        'Give it data of its own (data = "other.jsonl"), to stay as before on those; or lower the '
        "weight to learn more of the task."
    )


def test_a_brake_is_seen_by_its_bound_where_no_gradient_is_tracked() -> None:
    rows = balanced(30, base_norm=None, bound=0.32)
    bounded = replace(SUPERVISED, terms=(replace(KL, weight=None, bound="at_most"),))
    finding = one(rows, bounded)
    assert finding.rule == "brakes the base loss"
    assert finding.evidence.startswith("0.3 with a bound of 0.32; the base loss went from 4.6 to")
    assert "or raise the bound to learn more" in finding.cure


def test_a_brake_ends_when_the_loss_is_learned_all_the_same() -> None:
    learned = [row | {"base_loss/value": 0.1} for row in balanced()[-1:] * 8]
    finding = one([*balanced(20), *learned], SUPERVISED)
    assert (finding.rule, finding.ended) == ("brakes the base loss", 24)


def test_the_loss_of_a_sum_is_judged_by_its_mean() -> None:
    rows = [row | {"nll": row["base_loss/value"], "base_loss/value": 400.0} for row in balanced(20)]
    summed = replace(SUPERVISED, reduction="sum")
    assert "from 4.6 to 3.9 nats" in one(rows, summed).evidence


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        pytest.param(
            balanced(30), replace(SUPERVISED, terms=(replace(KL, batch_size=4),)), id="its own data"
        ),
        pytest.param(balanced(30), replace(SUPERVISED, answers=16), id="sampled answers"),
        pytest.param(balanced(30), replace(SUPERVISED, loss="ppo"), id="a policy loss"),
        pytest.param(balanced(30), Facts(terms=(KL,)), id="a loss that is not known"),
        pytest.param(balanced(30, cancelled=0.6), SUPERVISED, id="60 %"),
        pytest.param(balanced(30, end=0.1)[-1:] * 9, SUPERVISED, id="the task is learned"),
        pytest.param(balanced(30, base_norm=None), SUPERVISED, id="a weight, not tracked"),
        pytest.param(balanced(30, base_norm=None, bound=0.5), SUPERVISED, id="a slack bound"),
        pytest.param(balanced(30, bound=0.5, cancelled=0.3), SUPERVISED, id="a bound, tracked"),
        pytest.param(
            [
                row | {"regularizers/kl/value": None}
                for row in balanced(30, base_norm=None, bound=1)
            ],
            SUPERVISED,
            id="no value",
        ),
        pytest.param(
            balanced(30),
            replace(SUPERVISED, terms=(replace(KL, kind="l2", restraint=True),)),
            id="no divergence",
        ),
        pytest.param(
            [{**row, "base_loss/value": None} for row in balanced(30)], SUPERVISED, id="no loss"
        ),
        pytest.param(
            [row | {"regularizers/kl/weight": 0.0} for row in balanced(30)],
            SUPERVISED,
            id="an inactive bound",
        ),
    ],
)
def test_a_kl_that_is_no_brake_is_silent(rows: list[Row], facts: Facts) -> None:
    assert "brakes the base loss" not in rules(rows, facts)


# Small share.


def test_a_small_share_is_information_with_the_weight_that_gives_a_tenth() -> None:
    finding = one([term_row("own", norm=0.05)] * 12, OWN)
    assert (finding.rule, finding.severity, finding.step) == ("small share", "information", 7)
    assert finding.evidence == "0.50 % of the sum of the gradient norms at step 11"
    assert finding.cure == "take a weight of 2.2, which gives it 10 %"


def test_a_kl_of_small_share_may_stay_where_it_is() -> None:
    finding = one([term_row(value=0.02, norm=0.05)] * 12, Facts(terms=(KL,)))
    assert finding.cure.endswith("; or leave it, if it is to stay below 0.02, where it is")


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([term_row("own", norm=0.05, weight=0.0)] * 30, id="a weight of 0"),
        pytest.param(
            [term_row("own", norm=0.05, weight=0.1 * step / 30) for step in range(30)],
            id="warm-up",
        ),
        pytest.param([term_row("own", norm=0.5)] * 30, id="5 %"),
        pytest.param([term_row("own", norm=0.01, bound=5.0)] * 30, id="a bound"),
        pytest.param(
            [(term_row("own", norm=0.05) | {"regularizers/own/grad_space": "logits"})] * 30,
            id="another space",
        ),
        pytest.param([term_row("own", norm=0.05, base_norm=None)] * 30, id="not tracked"),
    ],
)
def test_a_share_that_says_nothing_is_silent(rows: list[Row]) -> None:
    assert rules(rows, OWN) == []


def test_a_share_of_one_has_no_better_weight() -> None:
    rows = [term_row("own", base_norm=0.0, norm=1.0)] * 30
    assert rules(rows, OWN) == []


# Time.


@pytest.mark.parametrize(
    ("run_in", "cure"),
    [
        ("auto", "compute it in a process"),
        ("process", "run it on Ray"),
        ("async", "give it a faster service"),
        ("ray", "give its task more resources"),
    ],
)
def test_a_term_that_takes_the_time_is_said_with_where_to_run_it(run_in: str, cure: str) -> None:
    facts = Facts(terms=(TermFacts("own", run_in=run_in),))
    slow = {"seconds": 2.0, "regularizers/own/duration": 1.5}
    finding = one([term_row("own") | slow] * 8, facts)
    assert (finding.rule, finding.severity, finding.step) == ("takes the time", "information", 5)
    assert finding.evidence == "1.5 of 2 s at step 7"
    assert finding.cure.startswith(cure)


def test_a_reward_that_takes_the_time_is_said_too() -> None:
    facts = Facts(rewards=(RewardFacts("short", run_in="process"),))
    row = answers_row(seconds=2.0) | {"rewards/short/seconds": 1.5}
    assert one([row] * 8, facts).what == "reward 'short' takes most of the time of a step"


@pytest.mark.parametrize(
    "more",
    [
        {"seconds": 2.0, "regularizers/own/duration": 0.8},  # not most of it
        {"seconds": 0.3, "regularizers/own/duration": 0.2},  # nobody waits for that
        {"regularizers/own/duration": 9.0},  # of how many?
        {"seconds": 2.0, "regularizers/own/duration": None},
    ],
)
def test_a_term_for_which_nobody_waits_is_silent(more: Row) -> None:
    assert rules([term_row("own", **more)] * 8, OWN) == []


# Skips.


def skipping(*steps: int, count: int = 20) -> list[Row]:
    reason = "TermTimeoutError: regularizer 'own' took longer than 30 s"
    failed: Row = {"skipped/own": 1.0, "skipped/own/reason": reason}
    return [failed if step in steps else term_row("own") for step in range(count)]


def test_a_term_that_is_skipped_at_three_of_ten_steps_is_said_with_the_reason() -> None:
    (finding,) = found(skipping(2, 6, 9), OWN)
    assert (finding.rule, finding.severity, finding.step) == ("skipped often", "warning", 9)
    assert "TermTimeoutError" in finding.evidence
    assert finding.ended == 19


def test_two_skips_in_a_hundred_steps_are_silent() -> None:
    assert rules(skipping(2, 60, count=100), OWN) == []


def test_a_term_that_failed_in_one_of_several_calls_of_a_step_was_skipped() -> None:
    rows = [{**term_row("own"), "skipped/own": 1.0}] * 3
    assert one(rows, OWN).evidence == "3 or more of its last 10 steps, the last one step 2"
