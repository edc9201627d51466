"""Charts of one run."""

from __future__ import annotations

from steelyard.experiment.report.detail_charts import (
    evaluation_section,
    held_out_section,
    optimizer_section,
    own_metrics_section,
    progress_section,
    throughput,
)
from steelyard.experiment.report.figure import (
    Figure,
    Section,
    Trace,
    bars,
    color,
    heatmap,
    line,
    log_axis,
    over_steps,
)
from steelyard.experiment.report.formatting import (
    cosine,
    cosine_spaces,
    format_change,
    format_space,
    join_names,
    number,
    percent,
    seconds,
)
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import (
    Findings,
    TermFinding,
    last_cosine,
    shares,
    tracked_rows,
)
from steelyard.experiment.report.reward_charts import reward_sections
from steelyard.experiment.step_metrics import cosine_to_base
from steelyard.spec import BASE

STACKED = {"barmode": "relative", "bargap": 0}
SECONDS = {"exponentformat": "SI", "minexponent": 0, "ticksuffix": "s"}


def sections(run: LoadedRun, found: Findings) -> list[Section]:
    """Sections of the report of one run; those without a chart are left out."""
    sections = [
        *reward_sections(run, found.rollouts),
        Section("loss", "Loss", "Total loss and base loss at each step.", _loss(run, found)),
        Section(
            "terms",
            "Every term over time",
            "The raw value of each regularizer, before its weight, each on its own scale.",
            _values(run, found),
        ),
        held_out_section(run),
        evaluation_section(run),
        own_metrics_section(run),
        Section(
            "multipliers",
            "Multipliers",
            "The weight that holds a term at its bound, the dashed line in the chart of its value.",
            _multipliers(run, found),
        ),
        Section(
            "contributions",
            "Contributions",
            "Weight × value of each regularizer, stacked: what it adds to the loss."
            + (" Under a lower bound it is subtracted." if found.bounded else ""),
            _contributions(run, found),
        ),
        Section(
            "gradients",
            "Gradient norms",
            "The norm of each term's weighted gradient. Only norms with respect to the same "
            "quantity have a common unit, and shares.",
            _gradients(run, found),
        ),
        progress_section(run),
        Section(
            "factors",
            "Factors of the aggregator",
            "What the aggregator puts on each term's weighted gradient; 1 is the plain sum.",
            _factors(run, found),
        ),
        Section(
            "cosines",
            "Cosines between gradients",
            "Between the gradients of two terms: +1 same direction, 0 orthogonal, −1 opposite. "
            + cosine_spaces(found.spaces[:1]),
            _cosines(run, found),
        ),
        optimizer_section(run),
        Section(
            "time",
            "Time per term",
            "Duration of a call in seconds, gradient included.",
            [*_time(run, found), *throughput(run)],
        ),
    ]
    return [section for section in sections if section.figures]


def _loss(run: LoadedRun, found: Findings) -> list[Figure]:
    held_out = run.series("held_out/loss")
    loss = Figure(
        "loss",
        "Training loss",
        f"Line chart: the total loss and the base loss over {found.steps} steps; the base loss "
        f"{format_change(found.base.value)}.",
        [
            line("total", run.series("loss_total"), "total"),
            line("base loss", run.series("base_loss/value"), "base"),
        ],
        note="The gap between the two lines is the sum of the contributions.",
        layout=over_steps("loss"),
        size="half" if held_out[0] else "wide",
    )
    if not held_out[0]:
        return [loss]
    trace = line("held-out", held_out, "c1") | {"mode": "lines+markers"}
    held_out_chart = Figure(
        "held-out",
        "Held-out loss",
        f"Line chart: the base loss on held-out data, {format_change(found.held_out)}.",
        [trace],
        note="The base loss on data that are not trained on.",
        layout=over_steps("loss") | {"showlegend": False},
    )
    return [loss, held_out_chart]


def _values(run: LoadedRun, found: Findings) -> list[Figure]:
    return [
        Figure(
            f"value-{index}",
            term.name,
            f"Line chart: the value of {term.name}, {format_change(term.value)}.",
            [
                line(term.name, run.series(f"regularizers/{term.name}/value"), color(index)),
                *_bound(run, term.name),
            ],
            layout=over_steps() | {"showlegend": False},
            size="small",
            height=190,
        )
        for index, term in enumerate(found.terms)
        if term.steps
    ]


def _bound(run: LoadedRun, name: str) -> list[Trace]:
    points = run.series(f"regularizers/{name}/bound")
    trace = line("bound", points, "total") | {"line": {"width": 1, "dash": "dash"}}
    return [trace | {"mode": "lines"}] if points[0] else []


def _multipliers(run: LoadedRun, found: Findings) -> list[Figure]:
    return [
        Figure(
            f"multiplier-{index}",
            term.name,
            f"Line chart: the multiplier of {term.name}, at the end {number(term.weight)}.",
            [line(term.name, run.series(f"regularizers/{term.name}/weight"), color(index))],
            layout=over_steps() | {"showlegend": False},
            size="small",
            height=190,
        )
        for index, term in enumerate(found.terms)
        if term.bound is not None
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
    means = join_names(f"{name} {number(term.contribution)}" for name, (_, term) in ran.items())
    return [
        Figure(
            "contributions",
            "Contributions to the loss",
            f"Stacked bar chart over steps. On average: {means}.",
            [base, *traces],
            note="Click “base loss” in the legend to put it under the others.",
            layout=over_steps("weight × value") | STACKED,
            size="wide",
            height=320,
        )
    ]


def _factors(run: LoadedRun, found: Findings) -> list[Figure]:
    terms = found.aggregated
    if not terms:
        return []
    means = join_names(f"{term.name} {number(term.factor)}" for term in terms)
    return [
        Figure(
            "factors",
            "Factors on the weighted gradients",
            f"Line chart over steps. On average: {means}.",
            [
                line(
                    "base loss" if index == 0 else term.name,
                    run.series(f"factors/{term.name}"),
                    "base" if index == 0 else color(index - 1),
                    index=max(0, index - 1),
                )
                for index, term in enumerate(terms)
                if term.factor is not None
            ],
            layout=over_steps("factor"),
            size="wide",
        )
    ]


def _gradients(run: LoadedRun, found: Findings) -> list[Figure]:
    return [
        figure
        for space in found.spaces
        for figure in (_norms(run, found, space), _shares(run, found, space))
        if figure.traces
    ]


def _norms(run: LoadedRun, found: Findings, space: str) -> Figure:
    in_base_space = space == found.base.space
    lines = [
        line(label, _positive(run.series(key)), color_name, index=max(0, index - 1))
        for index, label, key, color_name, _ in _gradient_terms(found, space)
    ]
    if in_base_space:
        lines.append(line("total", _positive(run.series("total_grad_norm")), "total"))
    names = join_names(each["name"] for each in lines)
    return Figure(
        "grad-norms" if in_base_space else f"grad-norms-{space}",
        f"Norms of the weighted gradients, with respect to the {format_space(space)}",
        f"Line chart on a logarithmic scale: the gradient norms of {names}.",
        lines,
        note="Logarithmic scale; a norm of 0 is a gap.",
        layout=over_steps("norm", **log_axis(lines, tickformat="~g")),
        height=340,
    )


def _shares(run: LoadedRun, found: Findings, space: str) -> Figure:
    terms = _gradient_terms(found, space)
    rows = tracked_rows(run)
    by_term = shares(rows, [term.name for *_, term in terms])
    steps = [row["step"] for row in rows]
    layers = [
        bars(label, steps, by_term[term.name], color_name, unit=".0%")
        for _, label, _, color_name, term in terms
    ]
    means = join_names(f"{label} {percent(term.share)}" for _, label, *_, term in terms)
    return Figure(
        "shares" if space == found.base.space else f"shares-{space}",
        f"Share of the gradient, with respect to the {format_space(space)}",
        f"Stacked bar chart over steps. Over the whole run: {means}.",
        layers if len(terms) > 1 else [],
        note=f"Each norm divided by the sum of the norms in this chart. Over the run: {means}.",
        layout=over_steps("", tickformat=".0%", range=[0, 1]) | STACKED,
        height=340,
    )


def _gradient_terms(found: Findings, space: str) -> list[tuple[int, str, str, str, TermFinding]]:
    """Index, label, metric of the norm, colour and statistics of the terms of one space."""
    terms = [(0, "base loss", "base_loss/grad_norm", "base", found.base)] + [
        (i + 1, term.name, f"regularizers/{term.name}/grad_norm_weighted", color(i), term)
        for i, term in enumerate(found.terms)
    ]
    return [each for each in terms if each[-1].space == space]


def _cosines(run: LoadedRun, found: Findings) -> list[Figure]:
    tracked = tracked_rows(run)
    steps = [row["step"] for row in tracked]
    by_step = {name: [cosine_to_base(row, name) for row in tracked] for name in run.terms}
    rows = {
        name: cosines
        for name, cosines in by_step.items()
        if any(value is not None for value in cosines)
    }
    if not rows:
        return []
    means = join_names(
        f"{term.name} {cosine(term.cosine)}" for term in found.terms if term.cosine is not None
    )
    height = 130 + 34 * len(rows)
    names = [BASE, *rows]
    matrix = [[1.0 if a == b else last_cosine(tracked, a, b) for b in names] for a in names]
    pairs = heatmap(names, names, matrix) | {
        "texttemplate": "%{z:.2f}",
        "showscale": False,
        "xgap": 2,
    }
    top_down = {"autorange": "reversed", "showgrid": False, "ticksuffix": " "}
    return [
        Figure(
            "cosines",
            "Cosine to the base loss, step by step",
            f"Heat map over steps. On average: {means}.",
            [heatmap(steps, list(rows), list(rows.values()))],
            note="A gap: the term did not run or had no gradient.",
            layout=over_steps("", **top_down),
            height=max(height, 300),
        ),
        Figure(
            "pairs",
            "All pairs, at the end",
            f"Heat map of the cosines between {join_names(names)} at the end.",
            [pairs],
            note="For each pair: the last step at which both terms had a gradient.",
            layout={"yaxis": top_down, "xaxis": {"showgrid": False}},
            height=max(height, 300),
        ),
    ]


def _time(run: LoadedRun, found: Findings) -> list[Figure]:
    means = {term.name: term.seconds for term in found.terms if term.seconds is not None}
    if not means:
        return []
    by_term = {name: run.series(f"regularizers/{name}/duration") for name in means}
    indices = {name: index for index, name in enumerate(run.terms)}
    mean_bars = [
        bars(name, [means[name]], [name], color(indices[name]))
        | {"orientation": "h", "hovertemplate": f"{seconds(means[name])}<extra></extra>"}
        | {"text": [seconds(means[name])], "textposition": "outside", "cliponaxis": False}
        for name in by_term
    ]
    lines = [
        line(name, _positive(points), color(indices[name]), index=indices[name])
        for name, points in by_term.items()
    ]
    step_times = run.series("seconds")
    if step_times[0]:
        lines.append(line("whole step", _positive(step_times), "total"))
    means_text = join_names(f"{name} {seconds(mean)}" for name, mean in means.items())
    return [
        Figure(
            "time-mean",
            "Mean time of a call",
            f"Bar chart: {means_text}.",
            mean_bars,
            note="Terms may run at the same time: their times do not add up to the step's.",
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
            f"Line chart on a logarithmic scale: seconds of {join_names(by_term)} at each step.",
            lines,
            note="Logarithmic scale. The first call may include the start of a worker.",
            layout=over_steps("", **log_axis(lines, **SECONDS)),
            height=max(300, 110 + 34 * len(means)),
        ),
    ]


def _positive(points: tuple[list[int], list[float]]) -> tuple[list[int], list[float | None]]:
    """Points for a logarithmic axis: None, a gap, where a value is 0."""
    steps, values = points
    return steps, [value if value > 0 else None for value in values]
