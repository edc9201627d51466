"""A chart as plain data: what Plotly draws, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Trace: TypeAlias = dict[str, Any]

COLORS = 8
DASHES = ("solid", "dot", "dash", "dashdot")
FEW_STEPS = 12
MANY_DECADES = 2


@dataclass(frozen=True)
class Figure:
    """One chart.

    Attributes:
        key: its name in the page.
        title: what it shows.
        alt: the same for somebody who cannot see it, with the gist of the numbers.
        traces: what Plotly draws. Colours are named in `meta`: the page has them for light and
            dark.
        note: how to read it.
        layout: what Plotly needs to know beyond the page's own layout.
        size: `"wide"`, `"half"` or `"small"`.
        height: in pixels.
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
    """Charts that answer one question.

    Attributes:
        key: its name in the page.
        title: the heading.
        intro: the question, or how to read the answer.
        figures: the charts.
    """

    key: str
    title: str
    intro: str
    figures: Sequence[Figure]


def color(index: int) -> str:
    """The name of the colour of the term or run at this place."""
    return f"c{index % COLORS + 1}"


def line(
    name: str, points: tuple[Sequence[int], Sequence[Any]], paint: str, *, index: int = 0
) -> Trace:
    """A line over steps, with markers where there are few of them."""
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
        "meta": {"color": paint},
        "hovertemplate": "%{y:.4g}",
    }


def bars(name: str, x: Sequence[Any], y: Sequence[Any], paint: str, *, unit: str = ".4g") -> Trace:
    """One layer of stacked bars."""
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": list(y),
        "marker": {"line": {"width": 0}},
        "meta": {"color": paint},
        "hovertemplate": f"%{{y:{unit}}}",
    }


def heat(x: Sequence[Any], y: Sequence[str], z: Sequence[Sequence[float | None]]) -> Trace:
    """Cosines as a heat map: one colour for agreement, one for conflict, none for 0."""
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


def logarithmic(traces: Sequence[Trace], **axis: Any) -> dict[str, Any]:
    """A logarithmic y axis with as many labels as its range can bear."""
    values = [y for trace in traces for y in trace["y"] if y is not None and math.isfinite(y)]
    decades = math.log10(max(values) / min(values)) if values else 0
    return {"type": "log", "dtick": 1 if decades > MANY_DECADES else "D2", **axis}


def over_steps(title: str = "", **axis: Any) -> dict[str, Any]:
    """The layout of a chart over steps; `axis` is for its y axis."""
    return {
        "xaxis": {"title": {"text": "step"}, "tickformat": "d"},
        "yaxis": {"title": {"text": title}, **axis},
    }
