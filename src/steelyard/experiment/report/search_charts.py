"""Report of a search for weights: sentences, importances, loss or reward against each term."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from steelyard.experiment.report.figure import Figure, Section, Trace, bars, color
from steelyard.experiment.report.formatting import join_names, percent, with_margin
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.search import Search

ENOUGH_TRIALS = 20
_LOSS, _REWARD, _TERM = "held_out/loss", "held_out/reward", "held_out/regularizers/"
_PARETO = (
    "{} and raw held-out value of a term in each completed trial; {}. No trial is better in both "
    "than one that is not dominated."
)


def summarize_search(search: Search, best: LoadedRun) -> list[str]:
    """Sentences about a search: its trials, the best one, and how far to trust it."""
    counts = Counter(trial.state for trial in search.trials)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    first = search.completed[0]
    weights = join_names(f"{name} = {weight:.4g}" for name, weight in first.weights.items())
    objective = f"{_objective(best.config)} {with_margin(first.objective)}"
    sentences = [
        f"{len(search.trials)} trial{'s' if len(search.trials) != 1 else ''}: {states}.",
        f"The best is trial {first.number}, with {weights}: {objective}, {_extreme(search)}.",
    ]
    if search.seeds == 1:
        sentences.append(
            "Each trial was trained once: part of its lead may be chance. A search with --seeds 3, "
            "in another folder, compares means of three runs."
        )
    return sentences


def sections(search: Search) -> list[Section]:
    """Sections of the report of a search; those without a chart are left out."""
    few = len(search.completed) < ENOUGH_TRIALS
    caution = (
        f" They mean little for {len(search.completed)} completed trials; {ENOUGH_TRIALS} or more "
        f"are better."
    )
    found = [
        Section(
            "importances",
            "Importance of each weight",
            "How much each weight decides whether a trial is among the best quarter (PED-ANOVA)."
            + (caution if few else ""),
            _importances(search.importances),
        ),
        Section(
            "pareto",
            f"{'Reward' if search.on_policy else 'Base loss'} against each term",
            _PARETO.format(
                "Held-out reward" if search.on_policy else "Held-out loss",
                "a higher reward and a lower value are better"
                if search.on_policy
                else "lower is better for both",
            ),
            [_pareto(search, term, i) for i, term in enumerate(_terms(search))],
        ),
    ]
    return [section for section in found if section.figures]


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


def _terms(search: Search) -> list[str]:
    """Terms that every completed trial measured, beside a loss or a sum that can be compared."""
    main = _REWARD if search.on_policy else _LOSS
    if search.on_policy and search.tunes_rewards:
        return []
    measured = [trial.held_out for trial in search.completed]
    return [
        key.removeprefix(_TERM)
        for key in measured[0]
        if key.startswith(_TERM) and all(key in each and main in each for each in measured)
    ]


def _importances(importances: Mapping[str, float]) -> list[Figure]:
    if not importances:
        return []
    shares = join_names(f"{name} {percent(share)}" for name, share in importances.items())
    trace = bars("importance", list(importances), list(importances.values()), "c1", unit=".0%")
    return [
        Figure(
            "importances",
            "Importances of the weights",
            f"Bar chart: {shares}.",
            [trace],
            layout={"yaxis": {"tickformat": ".0%", "range": [0, 1]}, "bargap": 0.5},
            size="wide",
            height=260,
        )
    ]


def _pareto(search: Search, term: str, index: int) -> Figure:
    trials, quantity = search.completed, "reward" if search.on_policy else "loss"
    points = [
        (trial.held_out[f"held_out/{quantity}"], trial.held_out[_TERM + term]) for trial in trials
    ]
    sign = -1.0 if search.on_policy else 1.0
    front = non_dominated([(sign * x, y) for x, y in points])
    best = sorted(
        (point, trial.number)
        for point, trial, kept in zip(points, trials, front, strict=True)
        if kept
    )
    others = [
        (point, trial.number)
        for point, trial, kept in zip(points, trials, front, strict=True)
        if not kept
    ]
    numbers = join_names(str(number) for _, number in best)
    kept = f"Trial {numbers} is" if len(best) == 1 else f"Trials {numbers} are"
    return Figure(
        f"pareto-{index}",
        term,
        f"Scatter chart of {len(trials)} trials. {kept} not dominated.",
        [
            _points("not dominated", best, color(index), quantity, joined=True),
            *([_points("dominated", others, "base", quantity, joined=False)] if others else []),
        ],
        note=f"{kept} not dominated.",
        layout={
            "hovermode": "closest",
            "xaxis": {"title": {"text": f"held-out {quantity}"}},
            "yaxis": {"title": {"text": f"held-out {term}"}},
        },
        height=340,
    )


def _points(
    name: str,
    points: Sequence[tuple[tuple[float, float], int]],
    color_name: str,
    quantity: str,
    *,
    joined: bool,
) -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers+text" if joined else "markers",
        "name": name,
        "x": [x for (x, _), _ in points],
        "y": [y for (_, y), _ in points],
        "text": [str(number) for _, number in points],
        "textposition": "top right",
        # Between two trials of the front only the corner is known to be reachable.
        "line": {"width": 1, "shape": "vh" if quantity == "reward" else "hv"},
        "marker": {"size": 9},
        "cliponaxis": False,
        "meta": {"color": color_name},
        "hovertemplate": f"trial %{{text}}: {quantity} %{{x:.4g}}, value %{{y:.4g}}<extra></extra>",
    }


def _extreme(search: Search) -> str:
    return "the highest" if search.direction == "maximize" else "the lowest"


def _objective(config: Mapping[str, object]) -> str:
    """Text of the objective in a config: a metric, or a weighted sum of metrics."""
    settings = config.get("tune")
    objective = settings.get("objective") if isinstance(settings, Mapping) else None
    if isinstance(objective, Mapping):
        return " + ".join(f"{weight:g} × {key}" for key, weight in objective.items())
    return str(objective or "objective")
