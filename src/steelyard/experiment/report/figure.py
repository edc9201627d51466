"""Charts as plain data: traces and layout for Plotly, with title and description."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from steelyard.experiment.paired_differences import Estimate

Trace: TypeAlias = dict[str, Any]

COLORS = 8
DASHES = ("solid", "dot", "dash", "dashdot")
FEW_STEPS = 12
MANY_DECADES = 2


@dataclass(frozen=True)
class Figure:
    """One chart.

    Attributes:
        key: id of the chart's element in the page.
        title: title above the chart.
        alt: text for screen readers, with the main numbers.
        traces: traces for Plotly. `meta` names their colour; `page.css` defines each name for light
            and dark mode.
        note: caption that explains how to read the chart.
        layout: layout for Plotly, on top of the common one in `page.js`.
        size: `"wide"`, `"half"` or `"small"`.
        height: height in pixels.
    """

    key: str
    title: str
    alt: str
    traces: Sequence[Trace]
    note: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)
    size: str = "half"
    height: int = 300


@dataclass(frozen=True)
class Section:
    """Charts under one heading.

    Attributes:
        key: prefix of the section's element ids in the page.
        title: heading of the section.
        intro: sentence below the heading.
        figures: charts of the section.
    """

    key: str
    title: str
    intro: str
    figures: Sequence[Figure]


def color(index: int) -> str:
    """Name of the colour of the term or run with this index; colours repeat after eight."""
    return f"c{index % COLORS + 1}"


def line(
    name: str, points: tuple[Sequence[int], Sequence[Any]], color_name: str, *, index: int = 0
) -> Trace:
    """Trace of a line over steps, with markers where there are few of them.

    Args:
        name: name in the legend.
        points: steps and values.
        color_name: see `color`.
        index: index of the term or run; after eight, colours repeat and dashes differ.
    """
    steps, values = points
    few = len(steps) <= FEW_STEPS
    return {
        "type": "scatter",
        "mode": "lines+markers" if few else "lines",
        "name": name,
        "x": list(steps),
        "y": list(values),
        "line": {"width": 2, "dash": DASHES[index // COLORS % len(DASHES)]},
        "marker": {"size": 5},
        "meta": {"color": color_name},
        "hovertemplate": "%{y:.4g}",
    }


def bars(
    name: str, x: Sequence[Any], y: Sequence[Any], color_name: str, *, unit: str = ".4g"
) -> Trace:
    """Trace of bars, one layer where bars are stacked; `unit` is the format in the hover text."""
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {"line": {"width": 0}},
        "meta": {"color": color_name},
        "hovertemplate": f"%{{y:{unit}}}",
    }


def with_intervals(
    x: Sequence[str], estimates: Sequence[Estimate | None], color_name: str
) -> Trace:
    """Trace of means as points with their intervals as error bars."""
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(x),
        "y": [None if each is None else each.mean for each in estimates],
        "error_y": {
            "type": "data",
            "array": [None if each is None else each.margin for each in estimates],
        },
        "marker": {"size": 8},
        "meta": {"color": color_name},
        "hovertemplate": "%{y:.4g} ± %{error_y.array:.2g}<extra></extra>",
    }


def heatmap(x: Sequence[Any], y: Sequence[str], z: Sequence[Sequence[float | None]]) -> Trace:
    """Trace of a heat map of cosines: one colour for +1, another for -1, neutral for 0."""
    return {
        "type": "heatmap",
        "x": list(x),
        "y": list(y),
        "z": [list(row) for row in z],
        "zmin": -1,
        "zmax": 1,
        "xgap": 1,
        "ygap": 2,
        "hoverongaps": False,
        "hovertemplate": "%{y} · %{x}: %{z:+.2f}<extra></extra>",
        "colorbar": {"thickness": 10, "tickvals": [-1, 0, 1], "ticktext": ["−1", "0", "+1"]},
        "meta": {"color": "diverging"},
    }


def log_axis(traces: Sequence[Trace], **axis: Any) -> dict[str, Any]:
    """Layout of a logarithmic y axis.

    Plotly labels only powers of ten (`dtick` 1); if the values span at most two decades, "D2"
    labels 1, 2 and 5 of each decade as well.
    """
    values = [y for trace in traces for y in trace["y"] if y is not None and math.isfinite(y)]
    decades = math.log10(max(values) / min(values)) if values else 0
    return {"type": "log", "dtick": 1 if decades > MANY_DECADES else "D2", **axis}


def over_steps(title: str = "", **axis: Any) -> dict[str, Any]:
    """Layout of a chart over steps; `axis` holds options of its y axis."""
    return {
        "xaxis": {"title": {"text": "step"}, "tickformat": "d"},
        "yaxis": {"title": {"text": title}, **axis},
    }
