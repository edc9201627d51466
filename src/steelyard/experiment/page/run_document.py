"""Document of one run as JSON: its sentences, findings, rows of terms and rewards, and curves."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from steelyard.doctor.finding import Finding, worst_first
from steelyard.experiment.page.charts import cosine_pairs, make_charts
from steelyard.experiment.page.formatting import (
    NONE,
    cosine,
    format_space,
    number,
    percent,
    seconds,
    skip_count,
    skip_reasons,
)
from steelyard.experiment.page.load import LoadedRun, configured_terms, term_name
from steelyard.experiment.page.plain_files import read_last_objects
from steelyard.experiment.page.run_statistics import (
    Change,
    RewardStatistics,
    RunStatistics,
    TermStatistics,
    reduction_of,
    violates,
)
from steelyard.experiment.page.sentences import headline, run_history, summarize
from steelyard.experiment.page.series import (
    MAX_POINTS,
    Floats,
    RunSeries,
    bucket_means,
    smooth,
    thin,
)
from steelyard.output.redaction import redact
from steelyard.output.step_metrics import short_reason
from steelyard.spec.error_messages import BASE

Document: TypeAlias = dict[str, Any]

_HEAT_COLUMNS = 400
_SPARK_POINTS = 60
_CHANGES = 2**20  # bytes of the changes, from their end
_BOUNDS = {"at_most": "at most", "at_least": "at least"}
_NOTICED = 0.01  # of a bound, by which its last value may be beyond it without a word
_MANY = 2  # values, without which nothing can be said to stay the same
_TERMS = (
    "The terms: value in the first and the last quarter of the steps at which it ran; its weight, "
    "or its bound with the range of the multiplier; means over these steps of the other columns. "
    "The share is that of the sum of all gradient norms of one kind over all steps, unless there "
    "is one of its kind alone, the cosine that to the gradient of the base loss."
)
_REWARDS = (
    "The rewards: mean over the answers in the first and the last quarter of the steps, mean "
    "spread over the answers of a step, last weight, mean over the held-out prompts at the first "
    "and the last evaluation, share of the gradient of the base loss and cosine to it, and the "
    "number of answers for which it failed."
)


def summary_document(
    run: LoadedRun, stats: RunStatistics, *, series: RunSeries, baseline: str | None = None
) -> Document:
    """Everything about a run but its curves.

    Args:
        run: the run.
        stats: its statistics.
        series: its curves, for the sparklines.
        baseline: sentence on the run with and without its terms, if there is a baseline.
    """
    document = {
        "headline": headline(run, stats, baseline),
        "sentences": [*summarize(stats), *run_history(run.folder)],
        "facts": facts([run], [stats]),
        "findings": [finding.to_dict() for finding in _in_order(stats.findings)],
        "terms": [term_row(run, stats, term, series) for term in (stats.base, *stats.terms)],
        "terms_caption": _TERMS,
        "rewards": [_reward_row(stats, reward, series) for reward in _rewards(stats)],
        "rewards_caption": _REWARDS,
        "changes": changes(run.folder, run),
        "failure": failure(run.failure),
    }
    finite: Document = without_nan(document)
    return finite


def curves_document(
    series: RunSeries,
    config: Mapping[str, Any],
    *,
    smoothing: float = 0.0,
    groups: Collection[str] = (),
    points: int = MAX_POINTS,
) -> Document:
    """Charts and curves of a run, the heat-map of its cosines, and what never changed.

    Args:
        series: the metrics; hold their lock.
        config: the config of the run, for the order of the terms and the reduction of the loss.
        smoothing: factor of the moving average, from 0 (none) to below 1.
        groups: groups of charts, see `Chart`, and `"cosines"`, the heat-map; all if empty.
        points: largest number of points of a curve.
    """
    constant = _constants(series)
    charts = make_charts(
        series.keys,
        series.texts,
        constant=constant,
        terms=[term_name(term) for term in configured_terms(config)],
        is_sum=reduction_of(config.get("loss") or {}) == "sum",
    )
    shown = [chart for chart in charts if not groups or chart.group in groups]
    drawn = {key for chart in charts for key in chart.curves}
    still = [key for key in constant if key not in drawn and not key.startswith("cosines/")]
    keys = [*(key for chart in shown for key in chart.curves), *([] if groups else still)]
    return {
        "position": str(series.position),
        "steps": series.steps,
        "last_step": series.last_step,
        "damaged": series.damaged,
        "keys": series.keys,
        "charts": [asdict(chart) for chart in shown],
        "curves": {key: _curve(*series.column(key), smoothing, points) for key in keys},
        "cosines": _heat_map(series) if not groups or "cosines" in groups else None,
        "constants": [
            {"key": key, "label": _label(key), "text": number(float(series.column(key)[1][-1]))}
            for key in still
        ],
        "skipped": [
            {"term": term, "reason": reason, "count": len(at), "last_step": at[-1]}
            for (term, reason), at in series.skipped.items()
        ],
    }


def facts(runs: Sequence[LoadedRun], stats: Sequence[RunStatistics]) -> list[str]:
    """Model, backend, number of terms and date of the runs; where they differ, all values."""
    texts = []
    models = [run.config.get("model") or {} for run in runs]
    for key in ("base_model", "rank", "backend"):
        # In the order of the runs; a run of another tool may lack a setting.
        values = list(dict.fromkeys(str(m[key]) for m in models if m.get(key) is not None))
        if len(values) > _MAX_VALUES:
            texts.append(f"{len(values)} {key.replace('_', ' ')}s")
        elif values:
            joined = ", ".join(values)
            texts.append(joined if key == "base_model" else f"{key} {joined}")
    texts.append(_count([len(statistics.terms) for statistics in stats], "regularizer"))
    if any(run.rewards for run in runs):
        texts.append(_count([len(run.rewards) for run in runs], "reward"))
    times = [time for run in runs for time in run.series("time")[1] if math.isfinite(time)]
    if times:
        texts.append(f"{datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M} UTC")
    return texts


_MAX_VALUES = 4  # of a setting, named among the facts; more are counted


def _count(counts: Sequence[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    if low < high:
        return f"{low} to {high} {noun}s"
    return f"{low} {noun}{'s' if low != 1 else ''}"


def _in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings that last, the worst first, and then those that have ended."""
    findings = list(findings)
    ended = [finding for finding in findings if finding.ended is not None]
    return [*worst_first(finding for finding in findings if finding.ended is None), *ended]


def term_row(
    run: LoadedRun, stats: RunStatistics, term: TermStatistics, series: RunSeries
) -> Document:
    """Row of the table of terms; of the base loss too."""
    is_base = term.name == BASE
    prefix = "base_loss" if is_base else f"regularizers/{term.name}"
    weight = _range(series.column(f"{prefix}/weight")[1])
    is_alone = term.gradient is not None and term.gradient.alone
    return {
        "name": term.name,
        "label": "base loss" if is_base else term.name,
        "color": None if is_base else run.terms.index(term.name),
        "kind": "base" if is_base else "term",
        "spark": _spark(series, f"{prefix}/value"),
        "value": _moved(term.value),
        "weight": weight,
        "bound": _bound(run, term),
        "share": None if is_alone else term.share,
        "cosine": term.cosine,
        "contribution": term.contribution,
        "grad_norm": term.grad_norm,
        "seconds": term.seconds,
        "factor": term.factor,
        "held_out": _moved(_held_out(series, term.name)),
        "texts": {
            "weight": NONE if weight is None else weight["text"],
            "share": f"alone ({format_space(term.space)})" if is_alone else percent(term.share),
            "cosine": cosine(term.cosine),
            "contribution": number(term.contribution),
            "grad_norm": number(term.grad_norm),
            "seconds": seconds(term.seconds),
            "factor": number(term.factor),
            "space": format_space(term.space),
            "steps": f"{term.steps} of {stats.steps}",
        },
        "finding": _worst(term.findings),
        "findings": [finding.to_dict() for finding in term.findings],
        "skipped": f"{skip_count(term)} ×: {skip_reasons(term)}" if term.skipped else None,
        "metrics": _metrics_of(series, prefix, term.name),
    }


def _reward_row(stats: RunStatistics, reward: RewardStatistics, series: RunSeries) -> Document:
    prefix = f"rewards/{reward.name}"
    own = worst_first(f for f in stats.findings if f.subject == prefix and f.ended is None)
    return {
        "name": reward.name,
        "label": reward.name,
        "color": len(stats.terms) + [each.name for each in _rewards(stats)].index(reward.name),
        "kind": "reward",
        "spark": _spark(series, f"{prefix}/mean"),
        "value": _moved(reward.mean),
        "weight": _range(series.column(f"{prefix}/weight")[1]),
        "bound": None,
        "share": reward.share,
        "cosine": reward.cosine,
        "held_out": _moved(reward.held_out),
        "std": reward.std,
        "failed": reward.failed,
        "texts": {
            "weight": number(reward.weight),
            "share": percent(reward.share),
            "cosine": cosine(reward.cosine),
            "std": number(reward.std),
            "failed": str(reward.failed),
            "held_out": NONE if reward.held_out is None else _moved_text(reward.held_out),
        },
        "finding": _worst(own),
        "findings": [finding.to_dict() for finding in own],
        "skipped": None,
        "metrics": _metrics_of(series, prefix, reward.name),
    }


def _rewards(stats: RunStatistics) -> Sequence[RewardStatistics]:
    return () if stats.rollouts is None else stats.rollouts.rewards


def _worst(findings: Sequence[Finding]) -> Document | None:
    return {"severity": findings[0].severity, "rule": findings[0].rule} if findings else None


def _moved(change: Change | None) -> Document | None:
    if change is None:
        return None
    ends = {"first": change.first, "last": change.last, "relative": change.relative}
    return ends | {"text": _moved_text(change)}


def _moved_text(change: Change) -> str:
    if change.steps == 1:
        return number(change.last)
    return f"{number(change.first)} → {number(change.last)}"


def _held_out(series: RunSeries, name: str) -> Change | None:
    key = "held_out/loss" if name == BASE else f"held_out/regularizers/{name}"
    values = [value for value in series.column(key)[1].tolist() if math.isfinite(value)]
    return Change(values[0], values[-1], 1, len(values)) if values else None


def _range(weights: Floats) -> Document | None:
    """Range and last value of a weight: a schedule moves it, and so does a bound."""
    finite = weights[np.isfinite(weights)]
    if not len(finite):
        return None
    low, high, last = float(finite.min()), float(finite.max()), float(finite[-1])
    text = number(last)
    if low != high:
        text = f"{number(low)} … {number(high)}, last {number(last)}"
    return {"text": text, "low": low, "high": high, "last": last}


def _bound(run: LoadedRun, term: TermStatistics) -> Document | None:
    if term.bound is None:
        return None
    entries = {term_name(entry): entry for entry in configured_terms(run.config)}
    weight = entries.get(term.name, {}).get("weight")
    settings = {**entries.get(term.name, {}), **(weight if isinstance(weight, dict) else {})}
    kind = next((words for key, words in _BOUNDS.items() if settings.get(key) is not None), "bound")
    key = f"regularizers/{term.name}/violation"
    last = run.series(key)[1][-1:]
    over = last[0] / abs(term.bound) if last and term.bound else 0.0
    beyond = f" ({percent(over)} beyond)" if over >= _NOTICED else ""
    kept = f"kept at {term.steps - term.unmet} of {term.steps} steps"
    return {
        "text": f"{kind} {number(term.bound)}{beyond}",
        "value": term.bound,
        "met": not last or not violates(last[0], term.bound),
        "text_met": f"{kept}; {term.beyond} at the rest"
        if term.unmet
        else f"kept at all {term.steps} steps",
    }


def _metrics_of(series: RunSeries, prefix: str, name: str) -> list[str]:
    return [
        key
        for key in series.keys
        if key.startswith((f"{prefix}/", f"held_out/{prefix}"))
        or (key.startswith("cosines/") and name in key.split("/")[1:])
    ]


def _spark(series: RunSeries, key: str) -> Document | None:
    steps, values = series.column(key)
    if not len(values):
        return None
    at = thin(values, _SPARK_POINTS)
    return {"steps": steps[at].tolist(), "values": _rounded(values[at])}


def changes(folder: Path, run: LoadedRun | None = None) -> list[Document]:
    """Settings that were changed while a run went on: the step, the time and what it was."""
    records, _ = read_last_objects(folder / "changes.jsonl", _CHANGES)
    times = {} if run is None else {row["step"]: row.get("time") for row in run.rows}
    return [
        {
            "step": record["step"],
            "time": times.get(record["step"]),
            "text": redact(
                ", ".join(f"{key} = {_value(value)}" for key, value in settings.items())
            ),
        }
        for record in records
        if type(record.get("step")) is int and isinstance(record.get("set"), list)
        for settings in record["set"]
        if isinstance(settings, dict)
    ]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def failure(row: Mapping[str, Any] | None) -> Document | None:
    """The step that failed, its error and the first words of its reason."""
    if not row or not isinstance(row.get("failed"), str):
        return None
    step = row.get("step")
    return {
        "step": step if type(step) is int else None,
        "error": row["failed"],
        "reason": short_reason(str(row.get("failed/reason", ""))),
    }


def _constants(series: RunSeries) -> list[str]:
    """Metrics that had the same value at every step, of which there were two or more."""
    constant = []
    for key in series.keys:
        _, values = series.column(key)
        if len(values) >= _MANY and np.isfinite(values[0]) and bool((values == values[0]).all()):
            constant.append(key)
    return constant


def _label(key: str) -> str:
    """Words for a metric: its key, without what all of its kind begin with.

    Example:
        >>> _label("regularizers/kl/weight"), _label("optim/learning_rate")
        ('kl weight', 'learning rate')
    """
    name = key.removeprefix("regularizers/").removeprefix("optim/").replace("/custom/", ": ")
    return name.replace("/", " ").replace("_", " ")


def _curve(
    steps: NDArray[np.int64], values: Floats, smoothing: float, points: int
) -> dict[str, Any]:
    at = thin(values, points)
    curve: dict[str, Any] = {"steps": steps[at].tolist(), "values": _rounded(values[at])}
    if smoothing:
        smoothed, weight = smooth(values, smoothing)
        at = thin(smoothed, points)
        curve["smooth"] = {
            "steps": steps[at].tolist(),
            "values": _rounded(smoothed[at]),
            "weight": weight,
        }
    return curve


def _heat_map(series: RunSeries) -> Document | None:
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


def without_nan(value: Any) -> Any:
    """Copy of a document with None for numbers that are not finite, as JSON has none."""
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
