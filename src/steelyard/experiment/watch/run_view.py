"""Contents of the page about one run: charts with their curves, the heat-map, skipped terms."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steelyard.experiment.watch.chart_groups import chart_groups, cosine_pairs
from steelyard.experiment.watch.run_index import METRICS, RunIndex
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
        path = self.index.path(name) / METRICS
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
            groups: groups of charts, see `Chart`, and `"cosines"`, the heat-map; all if empty.
        """
        series = self.series(name)
        with series.lock:
            series.refresh()
            charts = chart_groups(series.keys, series.texts)
            shown = [chart for chart in charts if not groups or chart.group in groups]
            keys = [key for chart in shown for key in chart.curves]
            return {
                "name": name,
                "position": str(series.position),
                "steps": series.steps,
                "last_step": series.last_step,
                "damaged": series.damaged,
                "keys": series.keys,
                "charts": [asdict(chart) for chart in shown],
                "curves": {key: _curve(*series.column(key), smoothing) for key in keys},
                "cosines": _heat_map(series) if not groups or "cosines" in groups else None,
                "skipped": [
                    {"term": term, "reason": reason, "count": len(at), "last_step": at[-1]}
                    for (term, reason), at in series.skipped.items()
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
    end = series.last_step + 1
    starts, rows = bucket_means(columns, end, _HEAT_COLUMNS)
    return {"pairs": pairs, "steps": starts, "end": end, "rows": rows}


def _rounded(values: Floats) -> list[float | None]:
    """Six digits, which no screen can resolve, take half the space of all; None if not finite."""
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values.tolist()]
