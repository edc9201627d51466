"""The charts of several runs: the same as of one, with a line or a bar for each run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steelyard.experiment.report.figure import (
    Figure,
    Section,
    bars,
    color,
    heat,
    line,
    over_steps,
)
from steelyard.experiment.report.findings import Findings
from steelyard.experiment.report.formatting import change, cosine, listed, number, percent, seconds
from steelyard.experiment.report.load import LoadedRun

BY_RUN = {"barmode": "relative", "bargap": 0.4}
SECONDS = {"exponentformat": "SI", "minexponent": 0, "ticksuffix": "s", "rangemode": "tozero"}


def sections(runs: Sequence[LoadedRun], found: Sequence[Findings]) -> list[Section]:
    """The charts of several runs, in the order in which one asks."""
    terms = list(dict.fromkeys(name for run in runs for name in run.terms))
    tracked = any(each.tracked for each in found)
    given = [
        Section("loss", "Loss", "Which run learns best?", _losses(runs, found)),
        Section(
            "terms",
            "Every term over time",
            "The raw value of each regularizer, before its weight; colours as in the table above.",
            _drawn(_each_run(runs, f"value-{i}", name, f"regularizers/{name}/value")
                   for i, name in enumerate(terms)),
        ),
        Section(
            "contributions",
            "What each term adds",
            "Weight × value of each regularizer, averaged over the steps of a run.",
            _added(runs, terms),
        ),
        Section(
            "gradients",
            "What each term pulls",
            "The norm of each term's weighted gradient with respect to the log-probs.",
            _pulled(runs, found, terms) if tracked else [],
        ),
        Section(
            "cosines",
            "Who agrees with the base loss",
            "Mean cosine to the base loss's gradient: +1 pulls the same way, −1 pulls back.",
            _agreement(runs, found, terms) if tracked else [],
        ),
        Section("time", "Time", "Seconds, averaged over the steps of a run.", _time(runs, terms)),
    ]  # fmt: skip
    return [section for section in given if section.figures]


def _each_run(
    runs: Sequence[LoadedRun], key: str, title: str, metric: str, size: str = "small"
) -> Figure:
    """A metric over steps, one line per run that has it."""
    there = [(i, run) for i, run in enumerate(runs) if run.series(metric)[0]]
    ends = listed(f"{run.name} {number(run.series(metric)[1][-1])}" for _, run in there)
    small = size == "small"
    return Figure(
        key,
        title,
        f"Line chart, one line per run. At the end: {ends}.",
        [line(run.name, run.series(metric), color(i), index=i) for i, run in there],
        layout=over_steps() | {"showlegend": not small},
        size=size,
        height=190 if small else 320,
    )


def _losses(runs: Sequence[LoadedRun], found: Sequence[Findings]) -> list[Figure]:
    keys = {"loss_total": "Total loss", "base_loss/value": "Base loss"}
    if any(each.held_out for each in found):
        keys = {"loss_total": "Total loss", "held_out/loss": "Held-out loss"}
    figures = [
        _each_run(runs, metric.partition("/")[0], title, metric, "half")
        for metric, title in keys.items()
    ]
    moved = "; ".join(
        f"{run.name} {change(each.loss)}" for run, each in zip(runs, found, strict=True)
    )
    first = figures[0]
    alt = f"Line chart, one line per run: {moved}."
    note = "Totals of runs with other terms or weights are not the same quantity."
    figures[0] = Figure(
        first.key, first.title, alt, first.traces, note, first.layout, first.size, first.height
    )
    return figures


def _added(runs: Sequence[LoadedRun], terms: Sequence[str]) -> list[Figure]:
    names = [run.name for run in runs]
    traces = [
        bars(term, names, [_mean(run, f"regularizers/{term}/contribution") for run in runs],
             color(i))
        for i, term in enumerate(terms)
    ]  # fmt: skip
    whole = listed(f"{run.name} {number(_mean(run, 'regularizer_total'))}" for run in runs)
    return [
        Figure(
            "contributions",
            "Contributions to the loss",
            f"Stacked bar chart, one bar per run: {whole}.",
            traces,
            layout={"yaxis": {"title": {"text": "added to the loss"}}, **BY_RUN},
            size="wide",
            height=320,
        )
    ] if terms else []  # fmt: skip


def _pulled(
    runs: Sequence[LoadedRun], found: Sequence[Findings], terms: Sequence[str]
) -> list[Figure]:
    names = [run.name for run in runs]
    shares = [{term.name: term.share for term in (each.base, *each.terms)} for each in found]
    layers = [
        bars(label, names, [of.get(term) for of in shares], paint, unit=".0%")
        for term, label, paint in [("base", "base loss", "base")]
        + [(term, term, color(i)) for i, term in enumerate(terms)]
    ]
    said = "; ".join(
        f"{run.name}: {listed(f'{k} {percent(v)}' for k, v in of.items() if v)}"
        for run, of in zip(runs, shares, strict=True)
    )
    share = Figure(
        "shares",
        "Share of the gradient",
        f"Stacked bar chart, one bar per run. {said}.",
        layers,
        note="Each norm in parts of the sum of all norms.",
        layout={"yaxis": {"tickformat": ".0%", "range": [0, 1]}, **BY_RUN},
        size="wide",
        height=320,
    )
    norms = [_each_run(runs, "norm-base", "base loss", "base_loss/grad_norm")] + [
        _each_run(runs, f"norm-{i}", term, f"regularizers/{term}/grad_norm_weighted")
        for i, term in enumerate(terms)
    ]
    return [share, *_drawn(norms)]


def _drawn(figures: Iterable[Figure]) -> list[Figure]:
    """The figures that have something to show."""
    return [figure for figure in figures if figure.traces]


def _agreement(
    runs: Sequence[LoadedRun], found: Sequence[Findings], terms: Sequence[str]
) -> list[Figure]:
    means = [{term.name: term.cosine for term in each.terms} for each in found]
    shown = [term for term in terms if any(of.get(term) is not None for of in means)]
    if not shown:
        return []
    trace = heat(shown, [run.name for run in runs], [[of.get(t) for t in shown] for of in means])
    said = "; ".join(
        f"{run.name}: {listed(f'{k} {cosine(v)}' for k, v in of.items() if v is not None)}"
        for run, of in zip(runs, means, strict=True)
    )
    return [
        Figure(
            "cosines",
            "Cosine to the base loss",
            f"Heat map, one row per run. {said}.",
            [trace | {"texttemplate": "%{z:.2f}", "xgap": 2}],
            layout={
                "yaxis": {"autorange": "reversed", "showgrid": False, "ticksuffix": " "},
                "xaxis": {"showgrid": False},
            },
            size="wide",
            height=max(220, 110 + 34 * len(runs)),
        )
    ]


def _time(runs: Sequence[LoadedRun], terms: Sequence[str]) -> list[Figure]:
    names = [run.name for run in runs]
    steps = [_mean(run, "seconds") for run in runs]
    said = listed(f"{run.name} {seconds(each)}" for run, each in zip(runs, steps, strict=True))
    whole = Figure(
        "time-steps",
        "Time of a step",
        f"Bar chart, one bar per run: {said}.",
        [bars("whole step", names, steps, "base")],
        layout={"yaxis": SECONDS, "bargap": 0.4},
        height=320,
    )
    durations = {
        term: [_mean(run, f"regularizers/{term}/duration") for run in runs] for term in terms
    }
    each = Figure(
        "time-terms",
        "Time of each term",
        f"Bar chart, a group of bars per run, for {listed(terms)}.",
        [bars(term, names, means, color(i)) for i, (term, means) in enumerate(durations.items())],
        note="Terms run side by side: their times do not add up to the step's.",
        layout={"yaxis": SECONDS, "barmode": "group", "bargap": 0.3},
        height=320,
    )
    return [figure for figure, there in ((whole, any(steps)), (each, terms)) if there]


def _mean(run: LoadedRun, key: str) -> float | None:
    values = run.series(key)[1]
    return sum(values) / len(values) if values else None
