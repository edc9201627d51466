"""The charts of one run, against the metrics in its folder."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest

from steelyard.experiment.report import charts, write_report
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import findings
from steelyard.experiment.report.sentences import summarize
from tests.experiment.folders import write_lines, write_run

from .conftest import Report
from .parsed_page import page_charts, series, text_of, trace_points


def test_charts_show_the_metrics(
    report: Report,
) -> None:
    page, rows = report.page, report.rows
    drawn = page_charts(page)
    assert trace_points(drawn["loss"]) == {
        "total": series(rows, "loss_total"),
        "base loss": series(rows, "base_loss/value"),
    }
    assert trace_points(drawn["held-out"]) == {"held-out": series(rows, "held_out/loss")}
    for index, name in enumerate(["evenness", "confidence", "judge", "length"]):
        value = trace_points(drawn[f"value-{index}"])
        assert value == {name: series(rows, f"regularizers/{name}/value")}
        added = trace_points(drawn["contributions"])
        assert added[name] == series(rows, f"regularizers/{name}/contribution")
        time = trace_points(drawn["time-steps"])
        assert time[name] == series(rows, f"regularizers/{name}/duration")
    norms = trace_points(drawn["grad-norms"])
    assert norms["base loss"] == series(rows, "base_loss/grad_norm")
    assert norms["total"] == series(rows, "total_grad_norm")
    steps, norms_of_judge = series(rows, "regularizers/judge/grad_norm_weighted")
    assert norms["judge"] == (steps, norms_of_judge)
    assert steps == [0, 2, 4, 6, 8, 10]
    assert "length" not in norms


def test_shares_add_up_to_one_at_every_step(report: Report) -> None:
    page, rows = report.page, report.rows
    shares = trace_points(page_charts(page)["shares"])
    assert set(shares) == {"base loss", "evenness", "confidence", "judge"}
    for step, row in enumerate(rows):
        here = [values[step] for _, values in shares.values() if values[step] is not None]
        assert sum(here) == pytest.approx(1)
        norms = row["base_loss/grad_norm"] + sum(
            row.get(f"regularizers/{name}/grad_norm_weighted", 0.0)
            for name in ("evenness", "confidence", "judge")
        )
        norm = row["regularizers/confidence/grad_norm_weighted"]
        assert shares["confidence"][1][step] == pytest.approx(norm / norms)


def test_cosines_equal_the_metrics(report: Report) -> None:
    page, rows = report.page, report.rows
    drawn = page_charts(page)
    heat = drawn["cosines"]["data"][0]
    assert heat["y"] == ["evenness", "confidence", "judge"]
    for name, line in zip(heat["y"], heat["z"], strict=True):
        assert line == [row.get(f"cosines/base/{name}") for row in rows]
    pairs = drawn["pairs"]["data"][0]
    assert pairs["x"] == pairs["y"] == ["base", *heat["y"]]
    matrix = pairs["z"]
    assert [matrix[i][i] for i in range(4)] == [1, 1, 1, 1]
    assert matrix[1][3] == matrix[3][1] == rows[10]["cosines/evenness/judge"]
    assert matrix[0][2] == rows[11]["cosines/base/confidence"]


def test_steps_without_norms_are_left_out_of_shares_and_cosines(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run")
    of_gradients = ("cosines/", "total_grad_norm")
    rows = [
        row
        if row["step"] % 5 == 0
        else {k: v for k, v in row.items() if "/grad_" not in k and not k.startswith(of_gradients)}
        for row in rows
    ]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    drawn = page_charts(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert drawn["cosines"]["data"][0]["x"] == [0, 5, 10]
    assert {tuple(steps) for steps, _ in trace_points(drawn["shares"]).values()} == {(0, 5, 10)}


def test_the_base_loss_is_below_the_contributions(report: Report) -> None:
    # Plotly stacks bars in the order of the traces, beginning at 0.
    traces = page_charts(report.page)["contributions"]["data"]
    assert (traces[0]["name"], traces[0]["visible"]) == ("base loss", "legendonly")


def test_plotly_accepts_every_chart(report: Report) -> None:
    for figure in page_charts(report.page).values():
        go.Figure({"data": figure["data"], "layout": figure["layout"]})  # raises on a wrong name


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", terms=[], steps=2, tracked=False, samples=[])
    page = write_report([tmp_path / "plain"], tmp_path / "plain.html")
    assert set(page_charts(page)) == {"loss", "held-out"}
    assert "There were no regularizers." in text_of(page)
    write_run(tmp_path / "untracked", steps=2, tracked=False)
    page = write_report([tmp_path / "untracked"], tmp_path / "untracked.html")
    assert not {"grad-norms", "shares", "cosines", "pairs"} & set(page_charts(page))
    assert "Gradient norms were not tracked" in text_of(page)


def test_zeros_are_gaps_on_logarithmic_axes() -> None:
    rows = [
        {"step": step, "base_loss/value": 1.0, "base_loss/grad_norm": norm, "total_grad_norm": 1.0}
        for step, norm in enumerate([0.0, 2.0])
    ]
    run = LoadedRun("run", Path(), {}, rows)
    figures = {
        figure.key: figure
        for section in charts.sections(run, findings(run))
        for figure in section.figures
    }
    assert figures["grad-norms"].traces[0]["y"] == [None, 2.0]
    assert figures["grad-norms"].layout["yaxis"]["type"] == "log"


def test_mean_times_are_bars_with_their_text() -> None:
    rows = [
        {"step": step, "regularizers/kl/contribution": 1.0, "regularizers/kl/duration": time}
        for step, time in enumerate([0.25, 0.75])
    ]
    run = LoadedRun("run", Path(), {}, rows)
    (time,) = [each for each in charts.sections(run, findings(run)) if each.key == "time"]
    mean, steps = time.figures
    (bar,) = mean.traces
    assert (bar["x"], bar["y"], bar["text"]) == ([0.5], ["kl"], ["500 ms"])
    assert mean.alt == "Bar chart: kl 500 ms."
    assert [trace["name"] for trace in steps.traces] == ["kl"], "no time of whole steps is known"


def test_a_bound_is_drawn_with_the_value_and_its_multiplier() -> None:
    at = "regularizers/kl"
    rows = [
        {"step": step, f"{at}/contribution": 0.1, f"{at}/value": value, f"{at}/weight": 0.5 * step,
         f"{at}/bound": 0.2, f"{at}/violation": max(0.0, value - 0.2)}
        for step, value in enumerate([0.1, 0.3, 0.201])
    ]  # fmt: skip
    run = LoadedRun("run", Path(), {}, rows)
    found = findings(run)
    figures = {
        figure.key: figure for section in charts.sections(run, found) for figure in section.figures
    }
    assert [trace["name"] for trace in figures["value-0"].traces] == ["kl", "bound"]
    assert figures["value-0"].traces[1]["y"] == [0.2, 0.2, 0.2]
    assert figures["multiplier-0"].traces[0]["y"] == [0.0, 0.5, 1.0]
    (term,) = found.terms
    assert (term.bound, term.unmet) == (0.2, 1), "0.201 is within 5 %"
    assert summarize(found)[2] == (
        "“kl” went from 0.100 to 0.201, with a bound of 0.200: it was beyond it by more than 5 % "
        "at 1 of 3 steps."
    )
    (section,) = [each for each in charts.sections(run, found) if each.key == "contributions"]
    assert section.intro.endswith("Under a lower bound it is subtracted.")


def test_the_factors_of_an_aggregator_are_drawn() -> None:
    at = "regularizers/kl"
    rows: list[dict[str, float]] = [
        {"step": step, "base_loss/value": 1.0, f"{at}/contribution": 0.1, f"{at}/value": 1.0}
        for step in range(3)
    ]
    plain = LoadedRun("run", Path(), {}, rows)
    assert "factors" not in [each.key for each in charts.sections(plain, findings(plain))]
    assert findings(plain).aggregated == []
    for row, factor in zip(rows[1:], [0.5, 0.25], strict=True):  # not at step 0: it took the sum
        row |= {"factors/base": 1.0, "factors/kl": factor}
    run = LoadedRun("run", Path(), {}, rows)
    found = findings(run)
    (section,) = [each for each in charts.sections(run, found) if each.key == "factors"]
    (figure,) = section.figures
    assert [(trace["name"], trace["x"], trace["y"]) for trace in figure.traces] == [
        ("base loss", [1, 2], [1.0, 1.0]),
        ("kl", [1, 2], [0.5, 0.25]),
    ]
    assert figure.alt == "Line chart over steps. On average: base 1.000 and kl 0.375."
    assert [term.factor for term in found.aggregated] == [1.0, 0.375]
