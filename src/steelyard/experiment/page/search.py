"""Document of a search for weights: trials, history, weights against objective, importances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from steelyard.experiment.compare.search_results import Search, TrialResult
from steelyard.experiment.page.formatting import (
    join_names,
    number,
    percent,
    seconds,
    with_margin,
)
from steelyard.experiment.page.load import LoadedRun

ENOUGH_TRIALS = 20
_LOSS, _REWARD, _TERM = "held_out/loss", "held_out/reward", "held_out/regularizers/"
_WIDE = 10.0  # times the smallest weight: from there on an axis is logarithmic


def summarize_search(search: Search, best: LoadedRun) -> list[str]:
    """Sentences about a search: its trials, the best one, and how far to trust it."""
    counts = Counter(trial.state for trial in search.trials)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    first = search.completed[0]
    weights = join_names(f"{name} = {weight:.4g}" for name, weight in first.weights.items())
    objective = f"{objective_of(best.config)} {with_margin(first.objective)}"
    sentences = [
        f"{len(search.trials)} trial{'s' if len(search.trials) != 1 else ''}: {states}.",
        f"The best is trial {first.number}, with {weights}: {objective}, {_extreme(search)}.",
    ]
    if search.seeds == 1:
        sentences.append(
            "Each trial was trained once: part of its lead may be chance. A search with --seeds 3, "
            "in another folder, compares means of three runs."
        )
    if search.importances and len(search.completed) < ENOUGH_TRIALS:
        sentences.append(
            f"Importances mean little for {len(search.completed)} completed trials; "
            f"{ENOUGH_TRIALS} or more are better."
        )
    sentences.append(
        f"Train with the weights of the best trial by: steelyard train {search.folder.name}"
        f"/best.json."
    )
    return sentences


def search_document(search: Search, best: LoadedRun) -> dict[str, Any]:
    """History, weights and importances of a search, and loss or reward against each term."""
    trials = sorted(search.trials, key=lambda trial: trial.number)
    values = [None if t.objective is None else t.objective.mean for t in trials]
    pick = min if search.direction == "minimize" else max

    def better(reached: float | None, value: float | None) -> float | None:
        known = [number for number in (reached, value) if number is not None]
        return pick(known) if known else None

    return {
        "objective": objective_of(best.config),
        "direction": search.direction,
        "history": {
            "numbers": [trial.number for trial in trials],
            "values": values,
            "best": list(accumulate(values, better)),
        },
        "parameters": _parameters(search),
        "importances": [
            {"name": name, "value": share, "text": percent(share)}
            for name, share in search.importances.items()
        ],
        "pareto": [_pareto(search, term) for term in _terms(search)],
    }


def trials_table(search: Search) -> dict[str, Any]:
    """Table of the trials, the best first."""
    weights = list(search.trials[0].weights)
    key = _REWARD if search.on_policy else _LOSS
    held_out = f"held-out {'reward' if search.on_policy else 'loss'}"
    own = ", own weights" if search.tunes_rewards else ""
    better = "lower" if search.direction == "minimize" else "higher"
    behind = search.seeds > 1
    columns = [("objective", better), *([("from the best", None)] if behind else [])]
    columns += [*((name, None) for name in weights), (f"{held_out}{own}", None), ("time", None)]

    def texts(trial: TrialResult) -> list[str]:
        from_best = [with_margin(trial.behind, signed=True)] if behind else []
        own_weights = [number(trial.weights.get(name)) for name in weights]
        ends = [number(trial.held_out.get(key)), seconds(trial.seconds), trial.state]
        return [with_margin(trial.objective), *from_best, *own_weights, *ends]

    means = (
        f"; objectives are means of {search.seeds} seeds, with their 95 % intervals, and "
        f"differences from the best trial are paired by seed"
        if behind
        else ""
    )
    return {
        "title": "Trials",
        "caption": f"The trials, the best first{means}.",
        "columns": [{"title": t, "better": b} for t, b in [*columns, ("state", None)]],
        "rows": [
            {
                "label": str(trial.number),
                "run": None,
                "color": None,
                "cells": [{"text": text, "detail": "", "tone": ""} for text in texts(trial)],
            }
            for trial in search.trials
        ],
    }


def non_dominated(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each point is not dominated: no other is at most as large in both, and differs.

    Example:
        >>> non_dominated([(1.0, 3.0), (2.0, 2.0), (2.0, 4.0), (3.0, 2.0)])
        [True, True, False, False]
    """
    return [
        not any(
            other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )
        for point in points
    ]


def objective_of(config: Mapping[str, object]) -> str:
    """Text of the objective in a config: a metric, or a weighted sum of metrics."""
    settings = config.get("tune")
    objective = settings.get("objective") if isinstance(settings, Mapping) else None
    if isinstance(objective, Mapping):
        return " + ".join(f"{weight:g} × {key}" for key, weight in objective.items())
    return str(objective or "objective")


def _extreme(search: Search) -> str:
    return "the highest" if search.direction == "maximize" else "the lowest"


def _parameters(search: Search) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for trial in search.completed for name in trial.weights)
    charts = []
    for name in names:
        points = [
            {"x": trial.weights[name], "y": trial.objective.mean, "number": trial.number}
            for trial in search.completed
            if name in trial.weights and trial.objective is not None
        ]
        values = [point["x"] for point in points]
        is_log = bool(values) and min(values) > 0 and max(values) >= _WIDE * min(values)
        charts.append({"name": name, "log": is_log, "points": points})
    return charts


def _terms(search: Search) -> list[str]:
    """Terms that every completed trial measured, beside a loss or a sum that can be compared."""
    main = _REWARD if search.on_policy else _LOSS
    if search.on_policy and search.tunes_rewards:
        return []
    measured = [trial.held_out for trial in search.completed]
    return [
        key.removeprefix(_TERM)
        for key in measured[0]
        if key.startswith(_TERM) and all(key in own and main in own for own in measured)
    ]


def _pareto(search: Search, term: str) -> dict[str, Any]:
    """Held-out loss or reward against the held-out value of a term, and what is not dominated."""
    trials, quantity = search.completed, "reward" if search.on_policy else "loss"
    points = [
        (trial.held_out[f"held_out/{quantity}"], trial.held_out[_TERM + term]) for trial in trials
    ]
    sign = -1.0 if search.on_policy else 1.0
    front = non_dominated([(sign * x, y) for x, y in points])
    kept = [str(trial.number) for trial, stays in zip(trials, front, strict=True) if stays]
    which = (
        f"Trial {kept[0]} is"
        if len(kept) == 1
        else f"Trials {join_names(sorted(kept, key=int))} are"
    )
    return {
        "title": term,
        "x": f"held-out {quantity}",
        "y": f"held-out {term}",
        # Between two trials of the front only the corner is known to be reachable.
        "step": "vh" if quantity == "reward" else "hv",
        "points": [
            {"x": x, "y": y, "number": trial.number, "front": stays}
            for (x, y), trial, stays in zip(points, trials, front, strict=True)
        ],
        "note": f"{which} not dominated: no other trial is better in both.",
    }
