"""One rule for flags: the live display and the report say the same of the same numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli.term_table import rows_of
from steelyard.experiment.flags import FLAGS, flags_of
from steelyard.experiment.report.findings import TermFinding, findings
from steelyard.experiment.report.load import LoadedRun

TRACKED = [False, True]
WEIGHTS = [0.0, 0.5]
NORMS = [None, 0.0, 2.0, float("nan")]
BASE_NORMS = [0.0, 0.5, 3.0]  # with a weighted norm of 1: a share of all, two thirds, a quarter
COSINES = [None, -1.0, -0.31, -0.3, 0.4]
CASES = list(itertools.product(TRACKED, WEIGHTS, NORMS, BASE_NORMS, COSINES))


def line(
    tracked: bool, weight: float, norm: float | None, base: float, cosine: float | None
) -> dict[str, Any]:
    """A line of metrics with one term, `kl`."""
    at = "regularizers/kl"
    values = {"step": 0, "loss_total": 3.0, "base_loss/value": 2.0}
    values |= {f"{at}/value": 2.0, f"{at}/weight": weight, f"{at}/contribution": 2.0 * weight}
    if tracked:
        values["base_loss/grad_norm"] = base
    if tracked and norm is not None:
        values |= {f"{at}/grad_norm": norm, f"{at}/grad_norm_weighted": weight * norm}
        values |= {} if cosine is None else {"cosines/base/kl": cosine}
    return values


def in_report(*lines: dict[str, Any]) -> TermFinding:
    """The only term of a run with these lines."""
    rows = [{**each, "step": step} for step, each in enumerate(lines)]
    (found,) = findings(LoadedRun("run", Path(), {}, rows)).terms
    return found


def by_the_table(
    tracked: bool, weight: float, norm: float | None, base: float, cosine: float | None
) -> list[str]:
    if not tracked:
        return []
    if norm is None or norm == 0:
        return ["no gradient"]
    if weight == 0:
        return []
    dominating = ["dominates"] if norm == 2 and base < 1 else []
    return dominating + (["fights the base loss"] if cosine in (-1.0, -0.31) else [])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_display_and_report_flag_the_same_numbers_alike(case: Any) -> None:
    step = line(*case)
    _, row = rows_of(step)
    assert list(row.flags) == by_the_table(*case)
    assert in_report(step).flags == in_report(step, step, step).flags == row.flags


def test_every_flag_and_no_flag_is_among_the_cases() -> None:
    found = {tuple(by_the_table(*case)) for case in CASES}
    assert found == {(), FLAGS[:1], FLAGS[1:2], FLAGS[:2], FLAGS[2:]}


def test_the_rule_needs_no_share_or_cosine() -> None:
    assert flags_of(tracked=True, weight=1.0, grad_norm=2.0, share=None, cosine=None) == ()


def test_a_gradient_or_weight_of_zero_at_some_steps_is_no_flag_of_the_run() -> None:
    at_rest = line(True, 0.5, 0.0, 3.0, 0.0)
    pulling = line(True, 0.5, 2.0, 0.5, -1.0)
    off = line(True, 0.0, 2.0, 0.5, -1.0)
    assert in_report(at_rest, pulling).flags == ("fights the base loss",)
    assert in_report(pulling, pulling, off).flags == ("fights the base loss",)
    assert in_report(off, off).flags == ()


def test_a_term_that_never_ran_where_norms_were_tracked_has_no_flag() -> None:
    untracked = line(False, 0.5, 2.0, 3.0, None)
    alone = {"base_loss/value": 2.0, "base_loss/grad_norm": 1.0}
    assert in_report(untracked, alone).flags == ()
    assert in_report({**alone, "skipped/kl": 1.0}).flags == ()
