"""Rules about a run as a whole: rows in which each is true, and rows that only look like it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steelyard.doctor.facts import Facts, TermFacts
from steelyard.errors import NonFiniteError, TermError
from steelyard.output.step_metrics import failed_row

from .series import Row, found, one, rules, term_row

FACTS = Facts(loss="cross_entropy", reduction="mean", learning_rate=0.01)


def losses(*values: float, **more: Any) -> list[Row]:
    return [{"base_loss/value": value, **more} for value in values]


# Not finite.


@pytest.mark.parametrize(
    ("key", "subject", "what"),
    [
        ("base_loss/value", "base_loss", "the base loss"),
        ("regularizers/kl/value", "regularizers/kl", "regularizer 'kl'"),
        ("regularizers/kl/grad_norm", "regularizers/kl", "regularizer 'kl'"),
        ("optim/unclipped_grad_l2:mean", "run", "the run"),
        ("held_out/loss", "run", "the run"),
    ],
)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e200, 10**400])
def test_a_number_that_is_not_finite_is_said_at_once(
    key: str, subject: str, what: str, number: float
) -> None:
    finding = one([term_row(loss_total=2.0), term_row() | {key: number}])
    assert (finding.rule, finding.subject, finding.step) == ("not finite", subject, 1)
    assert finding.what == f"{what} has a number that is not finite"
    assert finding.evidence.startswith(f"{key} = ")


def test_it_ends_after_three_finite_steps() -> None:
    (finding,) = found(losses(1.0, float("nan"), 1.0, 1.0, 1.0))
    assert (finding.step, finding.ended) == (1, 4)


def test_texts_and_missing_values_are_no_numbers() -> None:
    assert rules([{"base_loss/value": None, "loss_total": "NaN", "held_out/loss": True}]) == []


# Exploded.


def test_a_cross_entropy_that_doubles_has_exploded() -> None:
    finding = one(losses(5.9, 5.8, 5.0, 12.7, 12.5, 13.0), FACTS)
    assert (finding.rule, finding.severity, finding.step) == ("exploded", "problem", 5)
    assert finding.evidence == "5.9 in the first steps, 13 at step 5"
    assert (
        finding.cure == "divide the learning rate by 10 (from 0.01 to 0.001), or set grad_clip_norm"
    )


def test_a_sum_is_judged_by_its_tokens() -> None:
    facts = Facts(loss="cross_entropy", reduction="sum")
    rows = [{"base_loss/value": 100.0 * (step + 1), "nll": 1.0} for step in range(20)]
    assert rules(rows, facts) == []
    assert rules([{"nll": nll} for nll in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0)], facts) == ["exploded"]


def test_a_loss_that_is_ruined_by_the_first_updates_has_exploded() -> None:
    finding = one(losses(6.3, 6.75, 136.0, 679.0, 232.0, 267.0), FACTS)
    assert (finding.rule, finding.step) == ("exploded", 4)
    assert finding.evidence == "6.75 in the first steps, 267 at step 5"


def test_another_loss_explodes_by_orders_of_magnitude() -> None:
    assert rules(losses(0.01, -0.02, 0.01, 300.0, 300.0, -300.0)) == ["exploded"]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param((0.1, 0.1, 0.1, 0.3, 0.3, 0.3), id="small numbers"),
        pytest.param((2.5, 2.4, 6.0, 2.3, 6.0, 2.2, 2.1), id="two hard batches"),
        pytest.param((3.0, 2.9, 2.8, 2.5, 2.2, 2.0), id="it falls"),
    ],
)
def test_a_loss_in_its_range_is_silent(values: tuple[float, ...]) -> None:
    assert rules(losses(*values), FACTS) == []


def test_policy_losses_around_zero_are_silent() -> None:
    assert rules(losses(2e-8, 0.0, 0.0, 0.01, -0.3, 0.2, 0.3)) == []


def test_a_resumed_run_has_no_first_losses() -> None:
    assert rules(losses(1.0, 1.0, 1.0, 9.0, 9.0, 9.0), FACTS, start=7) == []


# Worse than untrained.


def held_out(*pairs: tuple[float | None, float]) -> list[Row]:
    return [
        {"base_loss/value": loss, **({} if value is None else {"held_out/loss": value})}
        for value, loss in pairs
    ]


def test_a_held_out_loss_above_that_of_the_untrained_model_is_a_problem() -> None:
    finding = one(held_out((5.9, 5.9), (None, 7.0), (12.7, 8.0)), FACTS)
    assert (finding.rule, finding.severity, finding.step) == ("worse than untrained", "problem", 2)
    assert finding.evidence == "held-out loss 5.9 → 12.7 at step 2"
    assert finding.cause.startswith("the training loss rose too, from 5.9 to 8")
    assert finding.cure.startswith("divide the learning rate by 10 (from 0.01 to 0.001)")


def test_where_the_training_loss_falls_its_lines_are_memorised() -> None:
    rows = held_out((3.0, 3.0), *[(None, 3.0 - 0.3 * step) for step in range(8)], (3.5, 0.2))
    finding = one(rows, FACTS)
    assert finding.cause.endswith("its lines are memorised")
    assert finding.cure == "make fewer steps, stop early, or take more data"


def test_without_training_losses_the_cause_is_not_known() -> None:
    finding = one([{"held_out/loss": 3.0}, {"held_out/loss": 4.0}], Facts(loss="cross_entropy"))
    assert finding.cause == ""
    assert finding.cure == "divide the learning rate by 10, or give the terms less weight"


@pytest.mark.parametrize(
    ("rows", "facts", "start"),
    [
        pytest.param(held_out((3.0, 3.0), (3.15, 2.0)), FACTS, 0, id="0.15 nats"),
        pytest.param(held_out((2.49, 2.0), (2.23, 2.0)), FACTS, 0, id="better"),
        pytest.param(held_out((3.0, 3.0), (9.0, 2.0)), FACTS, 8, id="resumed: no untrained one"),
        pytest.param(held_out((50.0, 50.0), (55.0, 49.0)), Facts(loss="own"), 0, id="own unit"),
        pytest.param(held_out((None, 3.0), (9.0, 2.0)), FACTS, 0, id="not measured at step 0"),
    ],
)
def test_a_held_out_loss_that_hardly_differs_is_silent(
    rows: list[Row], facts: Facts, start: int
) -> None:
    assert rules(rows, facts, start=start) == []


def test_it_ends_when_the_model_is_better_again() -> None:
    (finding,) = found(held_out((3.0, 3.0), (3.5, 3.0), (2.5, 2.0)), FACTS)
    assert (finding.step, finding.ended) == (1, 2)


# Overfits.


def test_a_held_out_loss_that_rises_from_its_best_while_training_falls_is_said() -> None:
    rows = held_out((3.0, 3.0), (2.4, 2.5), (2.45, 2.0), (2.52, 1.5), (2.55, 1.2))
    finding = one(rows, FACTS)
    assert (finding.rule, finding.severity, finding.step) == ("overfits", "warning", 4)
    assert finding.evidence == (
        "held-out loss 2.4 at step 1, 2.55 at step 4; training loss 2.5 → 1.35"
    )


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(held_out((3.0, 3.0), (2.4, 2.5), (2.45, 2.0), (2.44, 1.5)), id="noise"),
        pytest.param(held_out((3.0, 3.0), (2.4, 2.5), (2.6, 2.0), (2.3, 1.5)), id="once"),
        pytest.param(held_out((3.0, 3.0), (2.4, 2.0), (2.6, 4.0), (2.6, 5.0)), id="both rise"),
        pytest.param([{"held_out/loss": value} for value in (2.0, 2.15, 2.15)], id="no training"),
    ],
)
def test_a_held_out_loss_that_moves_otherwise_is_silent(rows: list[Row]) -> None:
    assert rules(rows, FACTS) == []


def test_it_ends_near_the_best() -> None:
    rows = held_out((2.4, 2.5), (2.55, 2.0), (2.56, 1.5), (2.44, 1.4))
    (finding,) = found(rows, FACTS)
    assert (finding.step, finding.ended) == (2, 3)


# Clipped.


def clipped(norm: float, count: int = 24, **more: Any) -> list[Row]:
    return [{"optim/unclipped_grad_l2:mean": norm, **more}] * count


CLIP = Facts(grad_clip_norm=1.0)


def test_clipping_at_most_steps_is_information() -> None:
    finding = one(clipped(3.0), CLIP)
    assert (finding.rule, finding.severity, finding.step) == (
        "clipped at most steps",
        "information",
        15,
    )
    assert finding.evidence == "norm 3 (median), clipped to 1, up to step 23"
    assert finding.cure == "set grad_clip_norm to about 6, so that it cuts the exceptions"


def test_a_norm_far_above_the_clip_is_a_warning() -> None:
    assert one(clipped(300.0), CLIP).severity == "warning"
    assert rules(clipped(3.0, 24, **{"optim/grad_clip_norm": 1.0})) == ["clipped at most steps"]


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        pytest.param(clipped(3.0), Facts(grad_clip_norm=0.0), id="not clipped"),
        pytest.param(clipped(3.0), Facts(), id="not known"),
        pytest.param((clipped(3.0, 1) + clipped(0.5, 1)) * 20, CLIP, id="every other step"),
        pytest.param(clipped(3.0, 10), CLIP, id="few steps"),
        pytest.param(losses(*[1.0] * 24), CLIP, id="no norm"),
    ],
)
def test_clipping_of_exceptions_is_silent(rows: list[Row], facts: Facts) -> None:
    assert rules(rows, facts) == []


# All together.


def test_a_run_that_is_well_has_no_findings() -> None:
    kl = TermFacts("kl", "kl_to_reference", bound="at_most", restraint=True, reduction="mean")
    facts = Facts(
        terms=(replace(kl, batch_size=4),),
        loss="cross_entropy",
        reduction="mean",
        batch_size=8,
        learning_rate=5e-4,
        grad_clip_norm=1.0,
    )
    rows = [
        term_row(
            value=min(0.01 * step, 0.308),
            bound=0.3,
            weight=0.0 if step < 20 else 2.0,
            cosine=-0.95,
            seconds=1.0,
            nll=3.0 - 0.02 * step,
            loss_total=3.0 - 0.02 * step,
        )
        | {"optim/unclipped_grad_l2:mean": 0.4}
        | ({"held_out/loss": 3.1 - 0.015 * step} if step % 10 == 0 else {})
        for step in range(60)
    ]
    assert rules(rows, facts) == []
    finding = one(rows, replace(facts, terms=(kl,)))  # on the tokens of the task
    assert (finding.rule, finding.severity) == ("brakes the base loss", "information")


# Failed.


@pytest.mark.parametrize(
    ("term", "subject", "what"),
    [
        ("kl", "regularizers/kl", "regularizer 'kl' has failed, and the run has ended"),
        ("base", "base_loss", "the base loss has failed, and the run has ended"),
        (None, "run", "a step has failed, and the run has ended"),
    ],
)
def test_a_step_that_failed_is_said_with_what_is_at_fault(
    term: str | None, subject: str, what: str
) -> None:
    error = TermError("it is away.", term=term)
    finding = one([{"loss_total": 1.0}, failed_row(1, 0.0, error)], FACTS)
    assert (finding.rule, finding.severity, finding.step) == ("failed", "problem", 1)
    assert (finding.subject, finding.what) == (subject, what)
    assert finding.evidence == "TermError at step 1: it is away"
    assert finding.cure == "correct it, and resume the run"


def test_a_number_that_is_not_finite_needs_smaller_steps() -> None:
    finding = one([failed_row(0, 0.0, NonFiniteError("the value is NaN", term="kl"))], FACTS)
    assert finding.cure.startswith("look at what it names, divide the learning rate by 10")
