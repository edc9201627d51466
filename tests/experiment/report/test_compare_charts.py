"""The charts of several runs, against the metrics in their folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from steelyard.experiment.report import compare_charts, write_report
from steelyard.experiment.report.figure import Figure
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import findings
from tests.experiment.folders import write_run

from .parsed_page import page_charts, series, text_of, trace_points


def test_several_runs_share_each_chart(tmp_path: Path) -> None:
    rows = {name: write_run(tmp_path / name, steps=n) for name, n in (("a", 4), ("b", 6))}
    page = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html")
    drawn = page_charts(page)
    for key, metric in (
        ("base_loss", "base_loss/value"),
        ("loss_total", "loss_total"),
        ("held_out", "held_out/loss"),
        ("value-1", "regularizers/confidence/value"),
        ("norm-2", "regularizers/judge/grad_norm_weighted"),
    ):
        assert trace_points(drawn[key]) == {name: series(own, metric) for name, own in rows.items()}
    added = trace_points(drawn["contributions"])["judge"]
    assert added[0] == ["a", "b"]
    assert added[1] == [
        pytest.approx(sum(series(own, "regularizers/judge/contribution")[1]) / len(own))
        for own in rows.values()
    ]
    text = text_of(page)
    assert "2 runs compared" in text
    assert "train.steps 4 6" in text
    for figure in drawn.values():
        go.Figure({"data": figure["data"], "layout": figure["layout"]})


def compared(*runs: LoadedRun) -> dict[str, Figure]:
    """Charts of these runs, by key."""
    sections = compare_charts.sections(runs, [findings(run) for run in runs])
    return {figure.key: figure for section in sections for figure in section.figures}


def run_with(name: str, term: str, **last: float) -> LoadedRun:
    """A run of two steps with one term, whose norm is as large as that of the base loss."""
    at = f"regularizers/{term}"
    row: dict[str, Any] = {
        "loss_total": 3.0, "base_loss/value": 2.0, "base_loss/grad_norm": 1.0,
        f"{at}/value": 2.0, f"{at}/weight": 0.5, f"{at}/contribution": 1.0,
        f"{at}/grad_norm": 2.0, f"{at}/grad_norm_weighted": 1.0, f"{at}/duration": 0.5,
        f"cosines/base/{term}": 0.25, "seconds": 1.0,
    }  # fmt: skip
    return LoadedRun(name, Path(), {}, [{"step": 0, **row}, {"step": 1, **row, **last}])


def test_runs_with_different_terms_share_the_charts() -> None:
    found = compared(run_with("a", "kl"), run_with("b", "l1", loss_total=1.0))
    assert set(found) == {
        "loss_total", "base_loss", "value-0", "value-1", "contributions", "shares", "norm-base",
        "norm-0", "norm-1", "cosines", "time-steps", "time-terms",
    }  # fmt: skip
    assert found["loss_total"].alt.endswith("At the end: a 3.000 and b 1.000.")
    assert [trace["name"] for trace in found["value-1"].traces] == ["b"]
    by_name = {trace["name"]: trace["y"] for trace in found["shares"].traces}
    assert by_name == {"base loss": [0.5, 0.5], "kl": [0.5, None], "l1": [None, 0.5]}
    (cosines,) = found["cosines"].traces
    assert (cosines["x"], cosines["y"]) == (["kl", "l1"], ["a", "b"])
    assert cosines["z"] == [[0.25, None], [None, 0.25]]
    assert found["time-steps"].traces[0]["y"] == [1.0, 1.0]


def test_evaluations_have_a_chart_with_a_line_for_each_run() -> None:
    rows = {name: [{"step": 0, "eval/f1": 0.25}, {"step": 1, "eval/f1": end}] for name, end in
            (("a", 0.5), ("b", 0.75))}  # fmt: skip
    runs = [LoadedRun(name, Path(), {}, own) for name, own in rows.items()]
    figure = compared(*runs)["eval-0"]
    assert figure.title == "f1"
    assert [(trace["name"], trace["y"]) for trace in figure.traces] == [
        ("a", [0.25, 0.5]),
        ("b", [0.25, 0.75]),
    ]


def intro_of_cosines(*runs: LoadedRun) -> str:
    sections = compare_charts.sections(runs, [findings(run) for run in runs])
    (found,) = [section.intro for section in sections if section.key == "cosines"]
    return found


def in_parameters(run: LoadedRun) -> LoadedRun:
    spaces = {"base_loss/grad_space": "parameters", "regularizers/kl/grad_space": "parameters"}
    return replace(run, rows=[{**row, **spaces} for row in run.rows])


def test_cosines_and_norms_of_different_spaces_are_told_apart() -> None:
    a, b = run_with("a", "kl"), run_with("b", "kl")
    assert intro_of_cosines(a, b).endswith("log-probs; with respect to the model's weights they "
                                           "may differ, even in sign.")  # fmt: skip
    assert compared(a, b)["norm-0"].note == ""
    both = in_parameters(a), in_parameters(b)
    assert intro_of_cosines(*both).endswith("opposite. With respect to the parameters.")
    assert compared(*both)["norm-0"].note == ""
    assert intro_of_cosines(a, both[1]).endswith(
        "With respect to the log-probs and parameters: only runs with the same one are comparable."
    )
    for key in ("norm-base", "norm-0"):
        assert compared(a, both[1])[key].note == (
            "Not comparable, since these norms are with respect to different quantities: a "
            "log-probs and b parameters."
        )
    # Each space has its own shares, in a chart of its own.
    by_run = {"shares": [0.5, None], "shares-parameters": [None, 0.5]}
    for key, expected in by_run.items():
        assert [trace["y"] for trace in compared(a, both[1])[key].traces] == [expected, expected]


def test_runs_without_terms_or_norms_have_the_charts_of_the_loss() -> None:
    rows = [{"step": 0, "loss_total": 1.0, "base_loss/value": 1.0, "held_out/loss": 2.0}]
    runs = [LoadedRun(name, Path(), {}, rows) for name in "ab"]
    assert set(compared(*runs)) == {"base_loss", "held_out", "loss_total"}
