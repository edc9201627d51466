"""Traces and layouts, as Plotly accepts them."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from steelyard.experiment.report.figure import bars, color, heatmap, line, log_axis, over_steps


def test_colors_repeat_after_eight() -> None:
    assert [color(index) for index in (0, 7, 8, 17)] == ["c1", "c8", "c1", "c2"]


@pytest.mark.parametrize(("index", "dash"), [(0, "solid"), (7, "solid"), (8, "dot"), (32, "solid")])
def test_lines_of_the_same_color_differ_in_their_dashes(index: int, dash: str) -> None:
    trace = line("kl", ([0, 1], [2.0, None]), color(index), index=index)
    assert trace["line"]["dash"] == dash
    assert (trace["x"], trace["y"], trace["meta"]) == ([0, 1], [2.0, None], {"color": color(index)})


@pytest.mark.parametrize(("steps", "mode"), [(12, "lines+markers"), (13, "lines")])
def test_markers_are_drawn_where_steps_are_few(steps: int, mode: str) -> None:
    points = (list(range(steps)), [1.0] * steps)
    assert line("loss", points, "total")["mode"] == mode


@pytest.mark.parametrize(
    ("values", "dtick"),
    [
        ([1.0, 99.0], "D2"),
        ([1.0, 101.0], 1),
        ([0.01, None, float("inf"), 0.5], "D2"),
        ([], "D2"),
    ],
)
def test_log_axis_labels_only_powers_of_ten_over_two_decades(
    values: list[float | None], dtick: object
) -> None:
    axis = log_axis([line("n", (range(len(values)), values), "c1")], tickformat="~g")
    assert axis == {"type": "log", "dtick": dtick, "tickformat": "~g"}


def test_plotly_accepts_the_traces_and_layouts() -> None:
    points = ([0, 1], [1.0, 0.5])
    traces = [
        line("a", points, "c1"),
        bars("b", *points, "c2", unit=".0%"),
        heatmap([0, 1], ["kl"], [[-1.0, None]]),
    ]
    layout = over_steps("loss", **log_axis(traces[:1]))
    figure = go.Figure({"data": traces, "layout": layout})  # raises on an unknown name
    assert figure.data[1].hovertemplate == "%{y:.0%}"
    assert (figure.data[2].zmin, figure.data[2].zmax) == (-1, 1)
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("step", "loss")
    assert figure.layout.yaxis.type == "log"
