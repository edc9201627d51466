"""Statistics of a run and its terms."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.experiment.report import write_report
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import (
    Change,
    Findings,
    TermFinding,
    cosine_key,
    findings,
    shares,
)
from tests.experiment.folders import flaky, specs, write_lines, write_run

from .parsed_page import text_of


def test_a_term_with_two_flags_has_both(tmp_path: Path) -> None:
    terms = specs()[:2]
    strong = [terms[0], type(terms[1])(terms[1].fn, 40.0, "confidence", run_in="inline")]
    write_run(tmp_path / "run", terms=strong, steps=3)
    text = text_of(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert "3 dominates fights the base loss" in text


def test_metrics_without_skip_counts_have_no_skipped_terms(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", terms=[*specs()[:1], flaky("away", None)], steps=2)
    old = [{k: v for k, v in row.items() if not k.startswith("skipped/")} for row in rows]
    write_lines(tmp_path / "run" / "metrics.jsonl", old)
    text = text_of(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert "2 regularizers" in text
    assert "skipped" not in text


def loaded(*rows: dict[str, float], steps: object = None) -> LoadedRun:
    """A run with these metrics, one row per step."""
    numbered = [{"step": step, **row} for step, row in enumerate(rows)]
    return LoadedRun("run", Path(), {"train": {"steps": steps}}, numbered)


def term_row(value: float, weight: float = 0.5, norm: float = 2.0) -> dict[str, float]:
    return {
        "base_loss/value": 2.0,
        "base_loss/grad_norm": 3.0,
        "regularizers/kl/value": value,
        "regularizers/kl/weight": weight,
        "regularizers/kl/contribution": weight * value,
        "regularizers/kl/grad_norm": norm,
        "regularizers/kl/grad_norm_weighted": weight * norm,
        "regularizers/kl/duration": 0.25,
        "cosines/base/kl": -0.5,
    }


def test_relative_change() -> None:
    assert Change(2.0, 1.0).relative == -0.5
    assert Change(-2.0, -1.0).relative == 0.5, "up, whatever the sign"
    assert Change(0.0, 1.0).relative is None


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([8.0, 6.0, 5.0, 5.0, 4.0, 4.0, 3.0, 1.0], Change(7.0, 2.0, 2)),
        ([8.0, 6.0, 4.0], Change(8.0, 4.0, 1)),
        ([float("nan"), 6.0, float("inf"), 4.0], Change(6.0, 4.0, 1)),
        ([float("nan")], None),
    ],
)
def test_change_compares_the_first_and_the_last_quarter(
    losses: list[float], expected: Change | None
) -> None:
    assert findings(loaded(*({"loss_total": loss} for loss in losses))).loss == expected


def test_statistics_of_a_term() -> None:
    rows = [term_row(4.0), {"base_loss/value": 4.0}, term_row(2.0, weight=0.25)]
    found = findings(loaded(*rows, steps=5))
    assert (found.steps, found.planned, found.tracked) == (3, 5, True)
    assert found.base.contribution == pytest.approx(8 / 3)
    (term,) = found.terms
    assert term == TermFinding(
        "kl",
        value=Change(4.0, 2.0),
        weight=0.25,
        contribution=1.25,
        grad_norm=0.75,
        share=term.share,
        cosine=-0.5,
        seconds=0.25,
        steps=2,
        flags=("fights the base loss",),
    )
    assert term.share == pytest.approx((1 / 4 + 0.5 / 3.5) / 2)


def test_shares_are_norms_divided_by_their_sum() -> None:
    assert shares(loaded(term_row(4.0), {"base_loss/grad_norm": 3.0})) == {
        "base": [0.75, 1.0],
        "kl": [0.25, None],
    }


def test_cosine_key_finds_either_order() -> None:
    run = loaded({"cosines/base/kl": 0.1, "cosines/l1/kl": 0.2})
    assert cosine_key(run, "base", "kl") == "cosines/base/kl"
    assert cosine_key(run, "kl", "l1") == cosine_key(run, "l1", "kl") == "cosines/l1/kl"


def test_extremes_and_flagged_terms_are_ordered() -> None:
    terms = [
        TermFinding("a", share=0.6, cosine=-0.4, flags=("dominates", "fights the base loss")),
        TermFinding("b", share=0.7, cosine=-0.9, flags=("dominates", "fights the base loss")),
        TermFinding("c", flags=("no gradient",)),
    ]
    found = Findings(1, None, None, None, None, True, TermFinding("base"), terms)
    assert [term.name for term in found.flagged("dominates")] == ["b", "a"]
    assert [term.name for term in found.flagged("fights the base loss")] == ["b", "a"]
    assert [term.name for term in found.flagged("no gradient")] == ["c"]
    assert found.extreme("share", max) == terms[1]
    assert found.extreme("cosine", min) == terms[1]
    assert found.extreme("seconds", max) is None


def test_skips_are_counted_by_reason_the_most_frequent_first() -> None:
    reasons = ["OSError: away", "ValueError: no", "OSError: away"]
    rows = [{"skipped/judge": 1.0, "skipped/judge/reason": reason} for reason in reasons]
    (term,) = findings(loaded(*rows)).terms  # type: ignore[arg-type]  # reasons are text
    assert list(term.skipped.items()) == [("OSError: away", 2), ("ValueError: no", 1)]
    assert (term.steps, term.value, term.flags) == (0, None, ())
