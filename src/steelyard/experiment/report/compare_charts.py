"""Charts of several runs: those of one run, with one line or bar per run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from steelyard.experiment.report.ablation_table import AblationTable
from steelyard.experiment.report.change import mean_of
from steelyard.experiment.report.detail_charts import EVALUATION, GRAD_NORM, evaluation_keys
from steelyard.experiment.report.figure import (
    Figure,
    Section,
    bars,
    color,
    heatmap,
    line,
    over_steps,
    with_intervals,
)
from steelyard.experiment.report.formatting import (
    cosine,
    cosine_spaces,
    format_space,
    join_names,
    number,
    percent,
    seconds,
)
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import Findings
from steelyard.experiment.report.reward_charts import ANSWER_METRICS, ANSWERS_INTRO
from steelyard.spec import BASE

BY_RUN = {"barmode": "relative", "bargap": 0.4}
SECONDS = {"exponentformat": "SI", "minexponent": 0, "ticksuffix": "s", "rangemode": "tozero"}


def sections(runs: Sequence[LoadedRun], found: Sequence[Findings]) -> list[Section]:
    """Sections of the report of several runs; those without a chart are left out."""
    terms = list(dict.fromkeys(name for run in runs for name in run.terms))
    tracked = any(each.tracked for each in found)
    sections = [
        *_rewards(runs),
        Section("loss", "Loss", "Loss of each run at each step.", _losses(runs)),
        Section(
            "terms",
            "Every term over time",
            "The raw value of each regularizer, before its weight; colours as in the table above.",
            _non_empty(_line_per_run(runs, f"value-{i}", name, f"regularizers/{name}/value")
                       for i, name in enumerate(terms)),
        ),
        Section(
            "held-out-terms",
            "Every term on held-out data",
            "The raw value of each regularizer on data that are not trained on.",
            _non_empty(_line_per_run(runs, f"held-out-{i}", name, f"held_out/regularizers/{name}")
                       for i, name in enumerate(terms)),
        ),
        Section(
            "evaluations",
            "Evaluations",
            "Numbers that your evaluation functions returned.",
            _evaluations(runs),
        ),
        Section(
            "contributions",
            "Contributions",
            "Weight × value of each regularizer, mean over all steps of a run: 0 where it did not "
            "run.",
            _contributions(runs, terms),
        ),
        Section(
            "gradients",
            "Gradient norms",
            "The norm of each term's weighted gradient.",
            _gradients(runs, found, terms) if tracked else [],
        ),
        Section(
            "cosines",
            "Cosines to the base loss",
            "Mean cosine to the gradient of the base loss: +1 same direction, −1 opposite. "
            + cosine_spaces(_base_spaces(found)),
            _cosines(runs, found, terms) if tracked else [],
        ),
        Section(
            "optimizer",
            "Optimizer",
            "The gradient of the total loss with respect to the trained weights.",
            _non_empty([_line_per_run(runs, "optimizer-grad-norm", "Gradient norm before clipping",
                                      GRAD_NORM, size="wide")]),
        ),
        Section("time", "Time", "Seconds, mean over the steps of a run.", _time(runs, terms)),
    ]  # fmt: skip
    return [section for section in sections if section.figures]


def effects(table: AblationTable) -> Section:
    """Section with the differences of an ablation and their intervals; empty with one seed."""
    figures = [] if table.seeds == 1 else [_effect(table, column) for column in table.held_out]
    intro = (
        f"Held-out value of each run, less that of the run with all terms: means of "
        f"{table.seeds} seeds, paired by seed, with 95 % intervals. Each interval holds on its "
        f"own; the verdicts hold together. The charts below are those of the first seed."
    )
    return Section("effects", "Effects and their intervals", intro, figures)


def _effect(table: AblationTable, column: str) -> Figure:
    index = table.columns.index(column)
    cells = {name: cells[index] for name, cells in table.rows[1:]}  # the first has all terms
    verdicts = join_names(f"{name} {cell.verdict or 'not tested'}" for name, cell in cells.items())
    return Figure(
        f"effect-{index}",
        column,
        f"Differences from the run with all terms: {verdicts}.",
        [with_intervals(list(cells), [cell.difference for cell in cells.values()], color(index))],
        layout={"yaxis": {"zeroline": True}, "xaxis": {"type": "category"}},
        size="small",
        height=240,
    )


def _line_per_run(
    runs: Sequence[LoadedRun], key: str, title: str, metric: str, size: str = "small", **axis: str
) -> Figure:
    """Line chart of a metric over steps, one line per run that has it.

    Further arguments are options of its y axis.
    """
    measured = [(i, run) for i, run in enumerate(runs) if run.series(metric)[0]]
    last_values = join_names(
        f"{run.name} {number(run.series(metric)[1][-1])}" for _, run in measured
    )
    small = size == "small"
    return Figure(
        key,
        title,
        f"Line chart, one line per run. At the end: {last_values}.",
        [line(run.name, run.series(metric), color(i), index=i) for i, run in measured],
        layout=over_steps(**axis) | {"showlegend": not small},
        size=size,
        height=190 if small else 320,
    )


def _evaluations(runs: Sequence[LoadedRun]) -> list[Figure]:
    keys = dict.fromkeys(key for run in runs for key in evaluation_keys(run))
    return [
        _line_per_run(runs, f"eval-{index}", key.removeprefix(EVALUATION), key)
        for index, key in enumerate(keys)
    ]


def _rewards(runs: Sequence[LoadedRun]) -> list[Section]:
    """Sections with the rewards and the answers of on-policy runs."""
    totals = {
        "reward": ("Weighted sum of the rewards", "rollouts/reward"),
        "reward-held-out": ("Held-out reward", "held_out/reward"),
    }
    note = "Sums of runs with different rewards or weights are not comparable."
    sums = [
        replace(_line_per_run(runs, key, title, metric, "half"), note=note)
        for key, (title, metric) in totals.items()
    ]
    names = dict.fromkeys(name for run in runs for name in run.rewards)
    each = [
        _line_per_run(runs, f"reward-{kind}-{index}", f"{name}{label}", key.format(name))
        for index, name in enumerate(names)
        for kind, label, key in (
            ("mean", "", "rewards/{}/mean"),
            ("held-out", ", held-out", "held_out/rewards/{}"),
        )
    ]
    answers = [
        _line_per_run(runs, f"answers-{index}", title, metric, tickformat=form, rangemode="tozero")
        for index, (metric, (title, form)) in enumerate(ANSWER_METRICS.items())
        if any(run.rewards for run in runs)
    ]
    return [
        Section(
            "rewards",
            "Rewards",
            "Mean over the answers of a step, and over the held-out prompts; before the weight.",
            _non_empty([*sums, *each]),
        ),
        Section("answers", "Answers over time", ANSWERS_INTRO, _non_empty(answers)),
    ]


def _losses(runs: Sequence[LoadedRun]) -> list[Figure]:
    keys = {"base_loss": "base_loss/value", "held_out": "held_out/loss", "loss_total": "loss_total"}
    titles = {"base_loss": "Base loss", "held_out": "Held-out loss", "loss_total": "Total loss"}
    figures = {
        key: _line_per_run(runs, key, titles[key], metric, "half") for key, metric in keys.items()
    }
    note = "Total losses of runs with different terms or weights are not comparable."
    figures["loss_total"] = replace(figures["loss_total"], note=note)
    return _non_empty(figures.values())


def _contributions(runs: Sequence[LoadedRun], terms: Sequence[str]) -> list[Figure]:
    names = [run.name for run in runs]
    traces = [
        bars(term, names,
             [_mean_over_all_steps(run, f"regularizers/{term}/contribution") for run in runs],
             color(i))
        for i, term in enumerate(terms)
    ]  # fmt: skip
    totals = join_names(
        f"{run.name} {number(mean_of(run.series('regularizer_total')[1]))}" for run in runs
    )
    return [
        Figure(
            "contributions",
            "Contributions to the loss",
            f"Stacked bar chart, one bar per run: {totals}.",
            traces,
            layout={"yaxis": {"title": {"text": "weight × value"}}, **BY_RUN},
            size="wide",
            height=320,
        )
    ] if terms else []  # fmt: skip


def _gradients(
    runs: Sequence[LoadedRun], found: Sequence[Findings], terms: Sequence[str]
) -> list[Figure]:
    first, *others = dict.fromkeys(space for each in found for space in each.spaces)
    shares = [
        _shares(runs, found, terms, first, "shares"),
        *(_shares(runs, found, terms, space, f"shares-{space}") for space in others),
    ]
    charts = {BASE: _line_per_run(runs, "norm-base", "base loss", "base_loss/grad_norm")} | {
        term: _line_per_run(runs, f"norm-{i}", term, f"regularizers/{term}/grad_norm_weighted")
        for i, term in enumerate(terms)
    }
    norms = [replace(chart, note=_spaces_note(runs, found, n)) for n, chart in charts.items()]
    return _non_empty([*shares, *norms])


def _base_spaces(found: Sequence[Findings]) -> list[str]:
    return list(dict.fromkeys(each.base.space for each in found if each.base.space is not None))


def _spaces_note(runs: Sequence[LoadedRun], found: Sequence[Findings], name: str) -> str:
    """Note that the norms of a term are not comparable; empty if all runs have the same space."""
    spaces = {
        run.name: term.space
        for run, each in zip(runs, found, strict=True)
        for term in (each.base, *each.terms)
        if term.name == name and term.space is not None
    }
    if len(set(spaces.values())) < 2:  # noqa: PLR2004 - nothing differs
        return ""
    named = join_names(f"{run} {format_space(space)}" for run, space in spaces.items())
    return f"Not comparable, since these norms are with respect to different quantities: {named}."


def _shares(
    runs: Sequence[LoadedRun],
    found: Sequence[Findings],
    terms: Sequence[str],
    space: str,
    key: str,
) -> Figure:
    by_run = [
        {term.name: term.share for term in (each.base, *each.terms) if term.space == space}
        for each in found
    ]
    names = [run.name for run in runs]
    layers = [
        bars(label, names, [by_term.get(term) for by_term in by_run], color_name, unit=".0%")
        for term, label, color_name in [("base", "base loss", "base")]
        + [(term, term, color(i)) for i, term in enumerate(terms)]
        if any(term in by_term for by_term in by_run)
    ]
    text = "; ".join(
        f"{run.name}: {join_names(f'{k} {percent(v)}' for k, v in by_term.items() if v)}"
        for run, by_term in zip(runs, by_run, strict=True)
    )
    return Figure(
        key,
        f"Share of the gradient, with respect to the {format_space(space)}",
        f"Stacked bar chart, one bar per run. {text}.",
        layers if len(layers) > 1 else [],
        note="Each norm divided by the sum of the norms in this chart, over all steps of a run.",
        layout={"yaxis": {"tickformat": ".0%", "range": [0, 1]}, **BY_RUN},
        size="wide",
        height=320,
    )


def _non_empty(figures: Iterable[Figure]) -> list[Figure]:
    """Figures that have at least one trace."""
    return [figure for figure in figures if figure.traces]


def _cosines(
    runs: Sequence[LoadedRun], found: Sequence[Findings], terms: Sequence[str]
) -> list[Figure]:
    means = [{term.name: term.cosine for term in each.terms} for each in found]
    shown = [term for term in terms if any(cosines.get(term) is not None for cosines in means)]
    if not shown:
        return []
    matrix = [[cosines.get(term) for term in shown] for cosines in means]
    trace = heatmap(shown, [run.name for run in runs], matrix)
    text = "; ".join(
        f"{run.name}: {join_names(f'{k} {cosine(v)}' for k, v in cosines.items() if v is not None)}"
        for run, cosines in zip(runs, means, strict=True)
    )
    return [
        Figure(
            "cosines",
            "Cosine to the base loss",
            f"Heat map, one row per run. {text}.",
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
    steps = [mean_of(run.series("seconds")[1]) for run in runs]
    means = join_names(f"{run.name} {seconds(mean)}" for run, mean in zip(runs, steps, strict=True))
    whole_step = Figure(
        "time-steps",
        "Time per step",
        f"Bar chart, one bar per run: {means}.",
        [bars("whole step", names, steps, "base")],
        layout={"yaxis": SECONDS, "bargap": 0.4},
        height=320,
    )
    durations = {
        term: [mean_of(run.series(f"regularizers/{term}/duration")[1]) for run in runs]
        for term in terms
    }
    each_term = Figure(
        "time-terms",
        "Time per term",
        f"Bar chart, a group of bars per run, for {join_names(terms)}.",
        [bars(term, names, times, color(i)) for i, (term, times) in enumerate(durations.items())],
        note="Terms may run at the same time: their times do not add up to the step's.",
        layout={"yaxis": SECONDS, "barmode": "group", "bargap": 0.3},
        height=320,
    )
    return [
        *([whole_step] if any(steps) else []),
        *([each_term] if terms else []),
    ]


def _mean_over_all_steps(run: LoadedRun, key: str) -> float | None:
    values = run.series(key)[1]
    return sum(values) / len(run.rows) if values else None
