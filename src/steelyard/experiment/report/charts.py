"""The charts of one run."""

from __future__ import annotations

from steelyard.experiment.report.figure import (
    Figure,
    Section,
    bars,
    color,
    heat,
    line,
    logarithmic,
    over_steps,
)
from steelyard.experiment.report.findings import Findings, cosine_key, shares
from steelyard.experiment.report.formatting import change, cosine, listed, number, percent, seconds
from steelyard.experiment.report.load import LoadedRun

STACKED = {"barmode": "relative", "bargap": 0}
SECONDS = {"exponentformat": "SI", "minexponent": 0, "ticksuffix": "s"}


def sections(run: LoadedRun, found: Findings) -> list[Section]:
    """The charts of a run, in the order in which one asks."""
    given = [
        Section("loss", "Loss", "Is it learning?", _loss(run, found)),
        Section(
            "terms",
            "Every term over time",
            "The raw value of each regularizer, before its weight, each on its own scale.",
            _values(run, found),
        ),
        Section(
            "contributions",
            "What each term adds",
            "Weight × value: the regularizers' part of the loss, stacked.",
            _contributions(run, found),
        ),
        Section(
            "gradients",
            "What each term pulls",
            "The norm of each term's weighted gradient with respect to the log-probs.",
            _gradients(run, found),
        ),
        Section(
            "cosines",
            "Who agrees with whom",
            "Cosines between gradients: +1 pulls the same way, 0 does not care, −1 pulls back.",
            _cosines(run, found),
        ),
        Section("time", "Time per term", "Seconds of a call, gradient included.", _time(run)),
    ]
    return [section for section in given if section.figures]


def _loss(run: LoadedRun, found: Findings) -> list[Figure]:
    held_out = run.series("held_out/loss")
    loss = Figure(
        "loss",
        "Training loss",
        f"Line chart: the total loss over {found.steps} steps, {change(found.loss)}.",
        [
            line("total", run.series("loss_total"), "total"),
            line("base loss", run.series("base_loss/value"), "base"),
        ],
        note="The gap between the two lines is what the regularizers add.",
        layout=over_steps("loss"),
        size="half" if held_out[0] else "wide",
    )
    if not held_out[0]:
        return [loss]
    trace = line("held-out", held_out, "c1") | {"mode": "lines+markers"}
    shown = Figure(
        "held-out",
        "Held-out loss",
        f"Line chart: the base loss on held-out data, {change(found.held_out)}.",
        [trace],
        note="The base loss on data that training never sees.",
        layout=over_steps("loss") | {"showlegend": False},
    )
    return [loss, shown]


def _values(run: LoadedRun, found: Findings) -> list[Figure]:
    return [
        Figure(
            f"value-{index}",
            term.name,
            f"Line chart: the value of {term.name}, {change(term.value)}.",
            [line(term.name, run.series(f"regularizers/{term.name}/value"), color(index))],
            layout=over_steps() | {"showlegend": False},
            size="small",
            height=190,
        )
        for index, term in enumerate(found.terms)
        if term.steps
    ]


def _contributions(run: LoadedRun, found: Findings) -> list[Figure]:
    ran = {term.name: (index, term) for index, term in enumerate(found.terms) if term.steps}
    if not ran:
        return []
    traces = [
        bars(name, *run.series(f"regularizers/{name}/contribution"), color(index))
        for name, (index, _) in ran.items()
    ]
    base = bars("base loss", *run.series("base_loss/value"), "base") | {"visible": "legendonly"}
    last = listed(f"{name} {number(term.contribution)}" for name, (_, term) in ran.items())
    return [
        Figure(
            "contributions",
            "Contributions to the loss",
            f"Stacked bar chart over steps. On average: {last}.",
            [*traces, base],
            note="Click “base loss” in the legend to put it under the others.",
            layout=over_steps("added to the loss") | STACKED,
            size="wide",
            height=320,
        )
    ]


def _gradients(run: LoadedRun, found: Findings) -> list[Figure]:
    if not found.tracked:
        return []
    every = [("base", "base loss", "base_loss/grad_norm", "base")] + [
        (name, name, f"regularizers/{name}/grad_norm_weighted", color(index))
        for index, name in enumerate(run.terms)
    ]
    norms = [
        line(label, _positive(run.series(key)), paint, index=index - 1 if index else 0)
        for index, (_, label, key, paint) in enumerate(every)
        if run.series(key)[0]
    ]
    total = line("total", _positive(run.series("total_grad_norm")), "total")
    steps = [row["step"] for row in run.rows]
    parts = shares(run)
    layers = [
        bars(label, steps, parts[name], paint, unit=".0%")
        for name, label, _, paint in every
        if any(part is not None for part in parts[name])
    ]
    said = listed(
        f"{term.name} {percent(term.share)}" for term in (found.base, *found.terms) if term.share
    )
    return [
        Figure(
            "grad-norms",
            "Gradient norms, weighted",
            f"Line chart on a logarithmic scale: the gradient norms of {listed(run.terms)}.",
            [*norms, total],
            note="On a logarithmic scale, where 0 is a gap.",
            layout=over_steps("norm", **logarithmic([*norms, total], tickformat="~g")),
            height=340,
        ),
        Figure(
            "shares",
            "Share of the gradient",
            f"Stacked bar chart over steps. On average: {said}.",
            layers,
            note="Each norm in parts of the sum of all norms.",
            layout=over_steps("", tickformat=".0%", range=[0, 1]) | STACKED,
            height=340,
        ),
    ]


def _cosines(run: LoadedRun, found: Findings) -> list[Figure]:
    steps = [row["step"] for row in run.rows]
    by_step = {
        name: [row.get(cosine_key(run, "base", name)) for row in run.rows] for name in run.terms
    }
    rows = {name: each for name, each in by_step.items() if any(c is not None for c in each)}
    if not rows:
        return []
    said = listed(
        f"{term.name} {cosine(term.cosine)}" for term in found.terms if term.cosine is not None
    )
    height = 130 + 34 * len(rows)
    names = ["base", *rows]
    matrix = [[1.0 if a == b else _last_cosine(run, a, b) for b in names] for a in names]
    shown = heat(names, names, matrix) | {
        "texttemplate": "%{z:.2f}",
        "showscale": False,
        "xgap": 2,
    }
    downwards = {"autorange": "reversed", "showgrid": False, "ticksuffix": " "}
    return [
        Figure(
            "cosines",
            "Cosine to the base loss, step by step",
            f"Heat map over steps. On average: {said}.",
            [heat(steps, list(rows), list(rows.values()))],
            note="A gap: the term did not run, or had no gradient.",
            layout=over_steps("", **downwards),
            height=max(height, 300),
        ),
        Figure(
            "pairs",
            "Every pair, at the last step",
            f"Heat map of the cosines between {listed(names)} at the last step.",
            [shown],
            note="Of each pair the last step at which both had a gradient.",
            layout={"yaxis": downwards, "xaxis": {"showgrid": False}},
            height=max(height, 300),
        ),
    ]


def _last_cosine(run: LoadedRun, a: str, b: str) -> float | None:
    values = run.series(cosine_key(run, a, b))[1]
    return values[-1] if values else None


def _time(run: LoadedRun) -> list[Figure]:
    by_term = {name: run.series(f"regularizers/{name}/duration") for name in run.terms}
    by_term = {name: each for name, each in by_term.items() if each[0]}
    if not by_term:
        return []
    means = {name: sum(values) / len(values) for name, (_, values) in by_term.items()}
    places = {name: index for index, name in enumerate(run.terms)}
    mean = [
        bars(name, [means[name]], [name], color(places[name]))
        | {"orientation": "h", "hovertemplate": f"{seconds(means[name])}<extra></extra>"}
        | {"text": [seconds(means[name])], "textposition": "outside", "cliponaxis": False}
        for name in by_term
    ]
    over = [
        line(name, _positive(points), color(places[name]), index=places[name])
        for name, points in by_term.items()
    ]
    whole = run.series("seconds")
    if whole[0]:
        over.append(line("whole step", _positive(whole), "total"))
    said = listed(f"{name} {seconds(mean)}" for name, mean in means.items())
    return [
        Figure(
            "time-mean",
            "Mean time of a call",
            f"Bar chart: {said}.",
            mean,
            note="Terms run side by side: their times do not add up to the step's.",
            layout={
                "showlegend": False,
                "xaxis": {"range": [0, 1.25 * max(means.values())], **SECONDS},
                "yaxis": {"autorange": "reversed", "ticksuffix": " ", "showgrid": False},
                "bargap": 0.35,
            },
            height=max(300, 110 + 34 * len(means)),
        ),
        Figure(
            "time-steps",
            "Time, step by step",
            f"Line chart on a logarithmic scale: seconds of {listed(by_term)} at each step.",
            over,
            note="On a logarithmic scale. A first call may include the start of a worker.",
            layout=over_steps("", **logarithmic(over, **SECONDS)),
            height=max(300, 110 + 34 * len(means)),
        ),
    ]


def _positive(points: tuple[list[int], list[float]]) -> tuple[list[int], list[float | None]]:
    """What a logarithmic axis can show: a gap where a value is 0."""
    steps, values = points
    return steps, [value if value > 0 else None for value in values]
