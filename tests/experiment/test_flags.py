"""Flags of terms: the live display and the report flag the same metrics alike."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli.term_table import rows_of
from steelyard.experiment.flags import FLAGS, flags_of
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import TermFinding, findings
from steelyard.experiment.step_metrics import Gradient

TRACKED = [False, True]
WEIGHTS = [0.0, 0.5]
NORMS = [None, 2.0, float("nan")]
BASE_NORMS = [0.0, 0.5, 3.0, 30.0]  # with a weighted norm of 1: shares of 1, 2/3, 1/4 and 3 %
COSINES = [None, -1.0, -0.31, -0.3, 0.4]
CASES = list(itertools.product(TRACKED, WEIGHTS, NORMS, BASE_NORMS, COSINES))


def line(
    tracked: bool, weight: float, norm: float | None, base: float, cosine: float | None
) -> dict[str, Any]:
    """Metrics of a step with one term, `kl`."""
    prefix = "regularizers/kl"
    values = {"step": 0, "loss_total": 3.0, "base_loss/value": 2.0}
    values |= {
        f"{prefix}/value": 2.0,
        f"{prefix}/weight": weight,
        f"{prefix}/contribution": 2.0 * weight,
    }
    if tracked:
        values["base_loss/grad_norm"] = base
    if tracked and norm is not None:
        values |= {f"{prefix}/grad_norm": norm, f"{prefix}/grad_norm_weighted": weight * norm}
        values |= {} if cosine is None else {"cosines/base/kl": cosine}
    return values


def in_report(*lines: dict[str, Any]) -> TermFinding:
    """Findings of the report on the only term of a run with these metrics."""
    rows = [{**each, "step": step} for step, each in enumerate(lines)]
    (found,) = findings(LoadedRun("run", Path(), {}, rows)).terms
    return found


def expected_flags(
    tracked: bool, weight: float, norm: float | None, base: float, cosine: float | None
) -> list[str]:
    if not tracked:
        return []
    if norm is None:
        return ["no gradient"]
    if weight == 0 or norm != 2:
        return []
    dominates = ["dominates"] if base < 1 else []
    fights = cosine in (-1.0, -0.31) and base in (0.5, 3.0)  # a base of 30 hardly notices
    return dominates + (["fights the base loss"] if fights else [])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_display_and_report_flag_the_same_numbers_alike(case: Any) -> None:
    step = line(*case)
    _, row = rows_of(step)
    assert list(row.flags) == expected_flags(*case)
    assert in_report(step).flags == in_report(step, step, step).flags == row.flags


def test_every_flag_and_no_flag_is_among_the_cases() -> None:
    found = {tuple(expected_flags(*case)) for case in CASES}
    assert found == {(), FLAGS[:1], FLAGS[1:2], FLAGS[:2], FLAGS[2:]}


def test_flags_without_a_share_or_a_cosine() -> None:
    assert flags_of(tracked=True, weight=1.0, gradient=Gradient(0.0, "logprobs")) == ()


def test_a_term_alone_in_its_space_does_not_dominate() -> None:
    elsewhere = {"regularizers/kl/grad_space": "parameters"}
    step = {**line(True, 0.5, 2.0, 0.1, None), **elsewhere}
    _, row = rows_of(step)
    found = in_report(step, step)
    assert (row.space, row.share, row.flags) == ("parameters", 1.0, ())
    assert (found.space, found.share, found.flags) == ("parameters", 1.0, ())


def test_opposition_counts_by_its_size() -> None:
    # cosine −0.9 with a tenth of the norm cancels 9 % of the base gradient, with a 25th 3.6 %
    assert in_report(line(True, 0.5, 2.0, 10.0, -0.9)).flags == ("fights the base loss",)
    assert in_report(line(True, 0.5, 2.0, 25.0, -0.9)).flags == ()


def test_a_gradient_of_zero_is_flagged_only_if_it_was_zero_at_every_step_of_a_run() -> None:
    zero = line(True, 0.5, 0.0, 3.0, 0.0)
    assert rows_of(zero)[1].flags == ()
    assert in_report(zero, zero).flags == ("no gradient",)
    assert in_report(zero, line(True, 0.5, 2.0, 3.0, 0.4)).flags == ()


def test_a_gradient_or_weight_of_zero_at_some_steps_does_not_flag_the_run() -> None:
    at_optimum = line(True, 0.5, 0.0, 3.0, 0.0)
    opposing = line(True, 0.5, 2.0, 0.5, -1.0)
    off = line(True, 0.0, 2.0, 0.5, -1.0)
    assert in_report(at_optimum, opposing).flags == ("fights the base loss",)
    assert in_report(opposing, opposing, off).flags == ("dominates", "fights the base loss")
    assert in_report(off, off).flags == ()


def test_a_term_that_never_ran_where_norms_were_tracked_has_no_flag() -> None:
    untracked = line(False, 0.5, 2.0, 3.0, None)
    alone = {"base_loss/value": 2.0, "base_loss/grad_norm": 1.0}
    assert in_report(untracked, alone).flags == ()
    assert in_report({**alone, "skipped/kl": 1.0}).flags == ()
