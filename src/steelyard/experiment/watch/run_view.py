"""Contents of the page about one run: charts with their curves, the heat-map, skipped terms."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.experiment.step_metrics import short_reason
from steelyard.experiment.watch.chart_groups import chart_groups, cosine_pairs
from steelyard.experiment.watch.run_index import RunIndex
from steelyard.experiment.watch.series import Floats, RunSeries, bucket_means, smooth, thin

_MAX_RUNS = 16  # whose metrics are kept in memory; 10,000 steps of 7 terms take 15 MB
_HEAT_COLUMNS = 400


class RunViews:
    """Views of the runs of an index; the metrics of the runs that were viewed last are kept."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._series: dict[str, RunSeries] = {}
        self._lock = threading.Lock()

    def series(self, name: str) -> RunSeries:
        """Metrics of a run.

        Raises:
            RunError: there is no such run.
        """
        path = self.index.path(name) / "metrics.jsonl"
        with self._lock:
            found = self._series.pop(name, None) or RunSeries(path)
            self._series[name] = found  # the last one is the one used last
            while len(self._series) > _MAX_RUNS:
                del self._series[next(iter(self._series))]
        return found

    def view(self, name: str, *, smoothing: float, groups: Collection[str] = ()) -> dict[str, Any]:
        """View of a run as JSON.

        Args:
            name: name of the run in the index.
            smoothing: factor of the moving average, from 0 (none) to below 1.
            groups: groups of charts, see `Chart`; all if empty, and the heat-map.
        """
        series = self.series(name)
        with series.lock:
            series.refresh()
            charts = chart_groups(series.keys, series.texts)
            shown = [chart for chart in charts if not groups or chart.group in groups]
            keys = [key for chart in shown for key in chart.curves]
            return {
                "name": name,
                "version": series.version,
                "size": series.size,
                "steps": series.steps,
                "last_step": series.last_step,
                "damaged": series.damaged,
                "keys": series.keys,
                "charts": [asdict(chart) for chart in shown],
                "curves": {key: _curve(*series.column(key), smoothing) for key in keys},
                "cosines": None if groups else _heat_map(series),
                "skipped": [
                    {"term": term, "reason": short_reason(term, reason), **asdict(skips)}
                    for (term, reason), skips in series.skipped.items()
                ],
            }


def _curve(steps: NDArray[np.int64], values: Floats, smoothing: float) -> dict[str, Any]:
    at = thin(values)
    curve: dict[str, Any] = {"steps": steps[at].tolist(), "values": _rounded(values[at])}
    if smoothing:
        smoothed, weight = smooth(values, smoothing)
        at = thin(smoothed)
        curve["smooth"] = {
            "steps": steps[at].tolist(),
            "values": _rounded(smoothed[at]),
            "weight": weight,
        }
    return curve


def _heat_map(series: RunSeries) -> dict[str, Any] | None:
    pairs = cosine_pairs(series.keys)
    if not pairs:
        return None
    columns = [series.column(key) for key in pairs]
    starts, rows = bucket_means(columns, series.last_step + 1, _HEAT_COLUMNS)
    return {"pairs": pairs, "steps": starts, "rows": rows}


def _rounded(values: Floats) -> list[float | None]:
    """Six digits, which no screen can resolve, take half the space of all; None if not finite."""
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values.tolist()]
