from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.experiment import RunFolder
from steelyard.experiment.page import run_views
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.page.run_views import RunViews
from steelyard.experiment.page.series import MAX_POINTS

from .conftest import STEPS


def test_a_view_has_the_curves_of_its_charts_and_the_cosines(trained: Path) -> None:
    view = RunViews(RunIndex(trained)).view("first", smoothing=0.0)
    rows = RunFolder(trained / "first").metrics()
    assert list(view["charts"][0]["curves"]) == ["loss_total", "base_loss/value", "held_out/loss"]
    drawn = {key for chart in view["charts"] for key in chart["curves"]}
    assert set(view["curves"]) == drawn | {row["key"] for row in view["constants"]}
    loss = view["curves"]["loss_total"]
    assert loss["steps"] == list(range(STEPS))
    assert loss["values"] == pytest.approx([row["loss_total"] for row in rows], rel=1e-5)
    assert "smooth" not in loss
    at = list(view["cosines"]["pairs"]).index("cosines/base/l2")
    expected = [row["cosines/base/l2"] for row in rows]
    assert view["cosines"]["rows"][at] == pytest.approx(expected, abs=1e-4)
    assert view["skipped"] == [
        {
            "term": "failing",
            "reason": "RuntimeError: the knowledge base is down",
            "count": STEPS,
            "last_step": STEPS - 1,
        }
    ]
    json.dumps(view, allow_nan=False)


def test_smoothed_curves_stand_beside_the_values(trained: Path) -> None:
    curve = RunViews(RunIndex(trained)).view("first", smoothing=0.5)["curves"]["loss_total"]
    a, b = curve["values"][:2]
    assert curve["smooth"]["values"][:2] == pytest.approx([a, (a + 2 * b) / 3], rel=1e-5)


def test_a_comparison_asks_for_some_groups(trained: Path) -> None:
    view = RunViews(RunIndex(trained)).view("first", smoothing=0.0, groups=["loss"])
    assert set(view["curves"]) == {"loss_total", "base_loss/value", "held_out/loss"}
    assert view["cosines"] is None
    both = RunViews(RunIndex(trained)).view("first", smoothing=0.0, groups=["loss", "cosines"])
    assert both["curves"] == view["curves"]
    whole = RunViews(RunIndex(trained)).view("first", smoothing=0.0)
    assert both["cosines"] == whole["cosines"]


def test_a_long_run_is_thinned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    steps = 3 * MAX_POINTS
    lines = [
        f'{{"step": {n}, "loss_total": {n % 7}, "cosines/base/kl": 0.5}}' for n in range(steps)
    ]
    lines[4321] = '{"step": 4321, "loss_total": 1e9, "cosines/base/kl": NaN}'
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    view = RunViews(RunIndex(tmp_path)).view(".", smoothing=0.9)
    curve = view["curves"]["loss_total"]
    for each in (curve, curve["smooth"]):
        assert len(each["steps"]) == len(each["values"]) <= MAX_POINTS
        assert each["steps"][-1] == steps - 1
    assert max(curve["values"]) == 1e9, "a peak of one step stays"
    assert len(view["cosines"]["steps"]) <= 400
    assert view["cosines"]["end"] == steps


def test_the_summary_of_a_long_run_comes_after_its_curves(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_views, "_LONG", STEPS - 1)
    views = RunViews(RunIndex(trained))
    first = views.view("first", smoothing=0.0)
    assert (first["pending"], first["headline"], first["terms"]) == (True, "", [])
    assert first["curves"]["loss_total"]["steps"] == list(range(STEPS))
    summary = views.summary("first")
    assert not summary["pending"]
    assert first.keys() - {"charts", "curves", "cosines", "position", "steps", "last_step",
                           "damaged", "keys", "skipped"} == summary.keys()  # fmt: skip
    assert views.view("first", smoothing=0.0) == first | summary


def test_the_metrics_of_few_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_views, "_MAX_RUNS", 2)
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    views = RunViews(RunIndex(tmp_path))
    a, b = views.series("a"), views.series("b")
    assert views.series("a") is a
    views.series("c")
    assert views.series("a") is a
    assert views.series("b") is not b, "it was used before the others"


def test_there_is_no_view_of_an_unknown_run(trained: Path) -> None:
    with pytest.raises(RunError, match="run must be one of the list, got 'other'"):
        RunViews(RunIndex(trained)).view("other", smoothing=0.0)
