"""Statistics of a run and its terms."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.load import LoadedRun
from steelyard.experiment.page.run_statistics import (
    Change,
    RunStatistics,
    TermStatistics,
    statistics_of,
)
from steelyard.output.step_metrics import Gradient
from tests.experiment.folders import flaky, specs, write_lines, write_run

from .frozen_page import everything, run_of


def test_a_finding_is_shown_with_its_cure_and_beside_its_term(tmp_path: Path) -> None:
    terms = specs()[:2]
    strong = [terms[0], type(terms[1])(terms[1].fn, 40.0, "confidence", run_in="inline")]
    write_run(tmp_path / "run", terms=strong, steps=12)
    shown = run_of(write_report([tmp_path / "run"], tmp_path / "report.html"))
    row = next(row for row in shown["terms"] if row["name"] == "confidence")
    assert row["finding"] == {"severity": "warning", "rule": "fights the base loss"}
    finding = next(f for f in shown["findings"] if f["rule"] == "fights the base loss")
    assert row["findings"] == [finding]
    assert finding["cure"].startswith("lower its weight, or give it a bound")
    assert finding["what"] == "regularizer 'confidence' works against the base loss"


def test_metrics_without_skip_counts_have_no_skipped_terms(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", terms=[*specs()[:1], flaky("away", None)], steps=2)
    old = [{k: v for k, v in row.items() if not k.startswith("skipped/")} for row in rows]
    write_lines(tmp_path / "run" / "metrics.jsonl", old)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "2 regularizers" in run_of(page)["facts"]
    assert "was skipped" not in everything(page)
    assert all(row["skipped"] is None for row in run_of(page)["terms"])


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
        ([8.0, 6.0, 5.0, 5.0, 4.0, 4.0, 3.0, 1.0], Change(7.0, 2.0, 2, 8)),
        ([8.0, 6.0, 4.0], Change(8.0, 4.0, 1, 3)),
        ([float("nan"), 6.0, float("inf"), 4.0], Change(6.0, 4.0, 1, 2)),
        ([float("nan")], None),
    ],
)
def test_change_compares_the_first_and_the_last_quarter(
    losses: list[float], expected: Change | None
) -> None:
    assert statistics_of(loaded(*({"loss_total": loss} for loss in losses))).loss == expected


def total(loss: float, **weights: float) -> dict[str, float]:
    """Metrics of a step with this total loss and terms with these weights."""
    terms = {f"regularizers/{name}/contribution": 1.0 for name in weights}
    terms |= {f"regularizers/{name}/weight": weight for name, weight in weights.items()}
    return {"loss_total": loss, **terms}


def test_totals_are_compared_only_between_steps_with_the_same_terms_and_weights() -> None:
    sometimes = [total(226.0, kl=0.1, rare=9.0), total(5.0, kl=0.1), total(4.0, kl=0.1)]
    assert statistics_of(loaded(*sometimes)).loss == Change(5.0, 4.0, 1, 2)
    warmup = [total(1.0, kl=0.1), total(2.0, kl=0.2), total(3.0, kl=0.3)]
    assert statistics_of(loaded(*warmup)).loss is None
    assert statistics_of(loaded(total(1.0, kl=0.1))).loss == Change(1.0, 1.0, 1, 1)


def test_statistics_of_a_term() -> None:
    rows = [term_row(4.0), {"base_loss/value": 4.0}, term_row(2.0, weight=0.25)]
    found = statistics_of(loaded(*rows, steps=5))
    assert (found.steps, found.planned, found.tracked) == (3, 5, 2)
    assert found.base.contribution == pytest.approx(8 / 3)
    (term,) = found.terms
    assert term == TermStatistics(
        "kl",
        value=Change(4.0, 2.0, 1, 2),
        weight=0.25,
        contribution=1.25,
        grad_norm=0.75,
        gradient=term.gradient,
        seconds=0.25,
        steps=2,
    )
    assert term.share == pytest.approx(1.5 / (6 + 1.5)), "sums of norms over all steps"
    assert (term.cosine, term.space) == (-0.5, "logprobs")
    assert term.cancelled == pytest.approx((1.5 + 0.75) / 18)
    assert found.base.share == pytest.approx(0.8)
    assert found.spaces == ["logprobs"]


def cosines(norm: float, **cosine: float) -> dict[str, float]:
    """A step at which the gradients of `kl` and `l1` have norm 1 and `norm`."""
    norms = {"regularizers/kl/grad_norm": 1.0, "regularizers/l1/grad_norm": norm}
    pairs = {f"cosines/{pair.replace('_', '/')}": value for pair, value in cosine.items()}
    return {"base_loss/grad_norm": 2.0, **norms, **pairs}


def gradient(share: float, cosine: float, cancelled: float, *, alone: bool = False) -> Gradient:
    return Gradient(1.0, "logprobs", share, alone, cosine, cancelled)


def test_extremes_are_those_of_terms_that_are_compared() -> None:
    terms = [
        TermStatistics("a", gradient=gradient(0.6, -0.4, 0.3)),
        TermStatistics("b", gradient=gradient(0.7, -0.9, 0.1)),
        TermStatistics("c"),
        TermStatistics("d", gradient=gradient(1.0, 0.0, 0.0, alone=True)),
    ]
    found = RunStatistics(1, None, None, None, None, True, TermStatistics("base"), terms)
    assert found.strongest == terms[1], "d is alone in its space"
    assert found.extreme("cosine", min) == terms[1]
    assert found.extreme("seconds", max) is None


def test_skips_are_counted_by_reason_the_most_frequent_first() -> None:
    reasons = ["OSError: away", "ValueError: no", "OSError: away"]
    rows = [{"skipped/judge": 1.0, "skipped/judge/reason": reason} for reason in reasons]
    (term,) = statistics_of(loaded(*rows)).terms  # type: ignore[arg-type]  # reasons are text
    assert list(term.skipped.items()) == [("OSError: away", 2), ("ValueError: no", 1)]
    assert (term.steps, term.value) == (0, None)
    assert [finding.rule for finding in term.findings] == ["skipped often"]
