"""Document of several runs, of an ablation or of a search: tables, effects, what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from steelyard.errors import SteelyardError
from steelyard.experiment.compare.statistics import (
    WITH_TERMS,
    WITHOUT_TERMS,
    effect_of_terms,
    has_both,
)
from steelyard.experiment.page.ablation_table import AblationTable, ablation_table
from steelyard.experiment.page.formatting import (
    NONE,
    cosine,
    cosine_spaces,
    format_space,
    number,
    percent,
    seconds,
    skip_count,
    skip_reasons,
    with_margin,
)
from steelyard.experiment.page.load import (
    ABLATION,
    Experiment,
    LoadedRun,
    configured_terms,
    load_run,
    load_runs,
    term_name,
)
from steelyard.experiment.page.plain_files import read_object
from steelyard.experiment.page.records import config, config_differences, sample_table
from steelyard.experiment.page.run_document import facts, without_nan
from steelyard.experiment.page.run_statistics import (
    Change,
    RunStatistics,
    TermStatistics,
    statistics_of,
)
from steelyard.experiment.page.search import search_document, summarize_search, trials_table
from steelyard.experiment.page.sentences import summarize_runs

Document: TypeAlias = dict[str, Any]
Cell: TypeAlias = dict[str, str]

COMPARED_GROUPS = (
    *("loss", "rewards", "values", "contributions", "gradients", "cosines", "weights"),
    *("rollouts", "held_out", "optimizer", "time"),
)
# Titles of the charts of losses, in their order: what compares best comes first.
_LOSSES = {
    "held_out/loss": "Held-out loss",
    "base_loss/value": "Base loss",
    "loss_total": "Total loss",
}
_MAX_TRIALS = 8  # of a search, whose curves are shown
_SEVERAL = 2
_TOTALS = "These are sums of different terms or weights, and are not comparable."
_REWARD_SUMS = "These are sums of different rewards or weights, and are not comparable."


@dataclass(frozen=True)
class Baseline:
    """The run without terms beside a run with all of them.

    Attributes:
        without: its folder.
        sentence: the held-out loss or reward with and without the terms.
    """

    without: Path
    sentence: str


def baseline_of(run: Path) -> Baseline | None:
    """Baseline of a run of an ablation or of `train --baseline`; None for any other run."""
    listed = read_object(run.parent / ABLATION).get("runs")
    if not isinstance(listed, dict) or listed.get(WITH_TERMS) != run.name:
        return None
    try:
        experiment = load_runs([run.parent])
        table = ablation_table(experiment)
    except SteelyardError:  # a run of it has not begun
        return None
    effects = {} if table is None else table.effects
    without = next((other for other in experiment.runs if other.name == WITHOUT_TERMS), None)
    if without is None or not has_both(effects):
        return None
    return Baseline(without.folder, effect_of_terms(effects))


def compare_document(
    experiment: Experiment, name_of: Callable[[Path], str], kind: str = "runs"
) -> Document:
    """Everything about several runs but their curves.

    Args:
        experiment: the runs.
        name_of: name of a run folder on the page.
        kind: `"runs"` or `"seeds"`; an ablation and a search say it themselves.
    """
    runs = list(experiment.runs)
    search, ablation = experiment.search, ablation_table(experiment)
    if search is not None:
        best = runs[0]
        runs = [
            load_run(f"trial {trial.number}", trial.runs[0])
            for trial in search.completed[:_MAX_TRIALS]
            if trial.runs
        ]
    statistics = [statistics_of(run) for run in runs]
    tables = [*_runs_tables(runs, statistics, name_of), *_terms_tables(runs, statistics)]
    sentences = summarize_runs(runs, statistics)
    if search is not None:
        kind, sentences = "search", summarize_search(search, best)
        tables = [trials_table(search), *tables]
    elif experiment.full is not None or experiment.seeds:
        kind = "ablation"
        own = [] if ablation is None else list(ablation.sentences)
        effect = (
            []
            if ablation is None or not has_both(ablation.effects)
            else [effect_of_terms(ablation.effects)]
        )
        sentences = [*effect, *(sentence for sentence in own if sentence not in effect)]
        sentences += _seed_sentences(experiment)
        tables = [*([] if ablation is None else [_ablation(ablation, runs, name_of)]), *tables]
    notes = _notes(runs)
    document = {
        "kind": kind,
        "title": _title(experiment, runs),
        "headline": sentences[0] if sentences else "",
        "sentences": sentences[1:],
        "facts": facts(runs, statistics),
        "notes": [*dict.fromkeys(notes.values())],
        "runs": [
            {"name": name_of(run.folder), "label": run.name, "color": index}
            for index, run in enumerate(runs)
        ],
        "tables": tables,
        "effects": [] if ablation is None else _effects(ablation),
        "search": None if search is None else search_document(search, best),
        "differences": [
            {"key": key, "values": values} for key, values in config_differences(runs).items()
        ],
        "samples": sample_table([(run.name, run.samples) for run in runs]),
        "configs": [{"label": run.name, **config(run.folder)} for run in runs],
        "chart_notes": notes,
    }
    finite: Document = without_nan(document)
    return finite


def comparison_charts(
    runs: Sequence[Document], views: Mapping[str, Document], notes: Mapping[str, str]
) -> list[Document]:
    """A chart for each metric, with a line for each run that has it.

    The title is part of what is compared: it names the space of a gradient norm, and norms of two
    spaces have no common scale.

    Args:
        runs: name, label and colour of each run.
        views: charts of each run, by name.
        notes: note on a metric that does not compare.
    """
    charts: dict[tuple[str, str], Document] = {}
    for run in runs:
        for chart in views[run["name"]]["charts"]:
            for metric, label in chart["curves"].items():
                if metric in chart["dashed"]:
                    continue
                alone = chart["group"] == "values" or len(chart["curves"]) == 1
                title = chart["title"] if alone else f"{chart['title']}: {label}"
                title = _LOSSES.get(metric, title)
                compared = charts.setdefault(
                    (title, metric),
                    {
                        "group": chart["group"],
                        "title": title,
                        "y": chart["y"],
                        "unit": chart["unit"],
                        "note": notes.get(metric, ""),
                        "lines": [],
                    },
                )
                line = {"run": run["name"], "label": run["label"], "color": run["color"]}
                compared["lines"].append(line | {"metric": metric})
    order = list(_LOSSES)
    by_metric = sorted(charts, key=lambda at: order.index(at[1]) if at[1] in order else len(order))
    return [charts[at] for at in by_metric]


def _title(experiment: Experiment, runs: Sequence[LoadedRun]) -> str:
    if experiment.search is not None:
        return f"Search: {experiment.search.folder.resolve().name}"
    if experiment.full is not None:
        return f"Ablation: {experiment.runs[0].folder.resolve().parent.name}"
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"


def _seed_sentences(experiment: Experiment) -> list[str]:
    if len(experiment.seeds) < _SEVERAL:
        return []
    count = sum(map(len, experiment.seeds.values()))
    return [
        f"{count} runs: {len(experiment.runs)} variants, {len(experiment.seeds)} seeds.",
        "The table of runs, and the charts of single runs, show those with the first seed.",
    ]


def _notes(runs: Sequence[LoadedRun]) -> dict[str, str]:
    """Notes on sums that do not compare, by their metric."""
    notes = {}
    if len({_weights(run, "regularizers") for run in runs}) > 1:
        notes["loss_total"] = f"Total losses: {_TOTALS[:1].lower()}{_TOTALS[1:]}"
    if any(run.rewards for run in runs) and len({_weights(run, "rewards") for run in runs}) > 1:
        text = f"Weighted rewards: {_REWARD_SUMS[:1].lower()}{_REWARD_SUMS[1:]}"
        notes |= {"rollouts/reward": text, "held_out/reward": text}
    return notes


def _weights(run: LoadedRun, table: str) -> str:
    entries = configured_terms(run.config, table)
    enabled = [term for term in entries if term.get("enabled", True)]
    return str(sorted((term_name(t), str(t.get("weight", 1.0))) for t in enabled))


def _cell(text: str, detail: str = "", tone: str = "") -> Cell:
    return {"text": text, "detail": detail, "tone": tone}


def _moved(change: Change | None) -> str:
    return NONE if change is None else f"{number(change.first)} → {number(change.last)}"


def _runs_tables(
    runs: Sequence[LoadedRun], statistics: Sequence[RunStatistics], name_of: Callable[[Path], str]
) -> list[Document]:
    rewarded = any(one.rollouts for one in statistics)
    fixed = not all(one.rollouts for one in statistics)
    skipping = any(one.skipping for one in statistics)
    columns: list[tuple[str, str | None]] = [("steps", None)]
    columns += [("reward", "higher"), ("held-out reward", "higher")] if rewarded else []
    columns += [("base loss", "lower"), ("held-out loss", "lower")] if fixed else []
    columns += [("time per step", None), ("findings", None)]
    columns += [("skipped", None)] if skipping else []

    def cells(one: RunStatistics) -> list[Cell]:
        texts = [str(one.steps)]
        if rewarded:
            ends = (
                (None, None)
                if one.rollouts is None
                else (one.rollouts.total, one.rollouts.held_out)
            )
            texts += map(_moved, ends)
        if fixed:
            texts += [_moved(one.per_token or one.base.value), _moved(one.held_out)]
        texts.append(seconds(one.seconds / one.steps if one.seconds else None))
        texts.append(", ".join(dict.fromkeys(f.rule for f in one.lasting)) or NONE)
        if skipping:
            skipped = (f"{t.name} {skip_count(t)} × ({skip_reasons(t)})" for t in one.skipping)
            texts.append("; ".join(skipped) or NONE)
        return [_cell(text) for text in texts]

    return [
        {
            "title": "Runs",
            "caption": "First and last quarter of the steps of each run; held-out values at the "
            "first and the last evaluation.",
            "columns": [{"title": title, "better": better} for title, better in columns],
            "rows": [
                {
                    "label": run.name,
                    "run": name_of(run.folder),
                    "color": index,
                    "cells": cells(one),
                }
                for index, (run, one) in enumerate(zip(runs, statistics, strict=True))
            ],
        }
    ]


def _terms_tables(runs: Sequence[LoadedRun], statistics: Sequence[RunStatistics]) -> list[Document]:
    """Tables with a row for each run and a column for each term."""
    names = list(dict.fromkeys(name for run in runs for name in run.terms))
    if not names:
        return []
    by_run = [{term.name: term for term in (one.base, *one.terms)} for one in statistics]
    spaces = list(dict.fromkeys(space for one in statistics for space in one.spaces))
    bases = list(dict.fromkeys(one.base.space for one in statistics if one.base.space is not None))

    def table(title: str, caption: str, text: Callable[[int, TermStatistics], str]) -> Document:
        rows = []
        for index, run in enumerate(runs):
            own = by_run[index]
            cells = [_cell(text(index, own[n]) if n in own else NONE) for n in names]
            rows.append({"label": run.name, "run": None, "color": index, "cells": cells})
        columns = [{"title": name, "better": None} for name in names]
        return {"title": title, "caption": caption, "columns": columns, "rows": rows}

    def contribution(index: int, term: TermStatistics) -> str:
        values = runs[index].series(f"regularizers/{term.name}/contribution")[1]
        return number(sum(values) / len(runs[index].rows) if values else None)

    shares = "Each norm divided by the sum of the norms of its kind, over all steps of a run."
    if len(spaces) > 1:
        shares += " With respect to " + ", ".join(map(format_space, spaces)) + "."
    tables = [
        table("Values of the terms", "First and last quarter of the steps.",
              lambda _, term: _moved(term.value)),
        table("Contributions", "Weight × value, mean over all steps: 0 where it did not run.",
              contribution),
        table("Share of the gradient", shares, lambda _, term: percent(term.share)),
        table("Cosine to the base loss", cosine_spaces(bases) if bases else "",
              lambda _, term: cosine(term.cosine)),
        table("Time of a call", "Terms may run at the same time.",
              lambda _, term: seconds(term.seconds)),
    ]  # fmt: skip
    return [
        filled
        for filled in tables
        if any(cell["text"] != NONE for row in filled["rows"] for cell in row["cells"])
    ]


def _ablation(
    table: AblationTable, runs: Sequence[LoadedRun], name_of: Callable[[Path], str]
) -> Document:
    index_of = {run.name: index for index, run in enumerate(runs)}
    rows = []
    for label, comparisons in table.rows:
        cells = []
        for column, compared in zip(table.columns, comparisons, strict=True):
            better = "higher" if column in table.rewards else "lower"
            tone = ("good" if compared.verdict == better else "bad") if compared.is_resolved else ""
            difference = compared.difference
            detail = "" if difference is None else with_margin(difference, signed=True)
            value = None if compared.value is None else compared.value.mean
            cells.append(_cell(number(value), detail, tone))
        run = runs[index_of[label]]
        rows.append(
            {"label": label, "run": name_of(run.folder), "color": index_of[label], "cells": cells}
        )
    seeds = (
        f"Means of {table.seeds} seeds, and below them the difference from the run with all terms, "
        f"paired by seed, with its 95 % interval; it is coloured where there is a verdict."
        if table.seeds > 1
        else "Numbers of each run, and below them the difference from the run with all terms."
    )
    return {
        "title": "Effect of leaving out each term" + (" or reward" if table.rewards else ""),
        "caption": f"{seeds} {'Rewards' if table.rewards else 'Loss'} and terms on held-out data "
        f"at the last step at which they were measured; otherwise, and for the time, means over "
        f"the last quarter of the steps.",
        "columns": [
            {
                "title": column,
                "better": "higher"
                if column in table.rewards
                else None
                if column == "seconds per step"
                else "lower",
            }
            for column in table.columns
        ],
        "rows": rows,
    }


def _effects(table: AblationTable) -> list[Document]:
    """Differences from the run with all terms, of each held-out quantity, with their intervals."""
    charts = []
    for column in table.held_out:
        at = table.columns.index(column)
        better = "higher" if column in table.rewards else "lower"
        rows = []
        for label, comparisons in table.rows[1:]:  # the first has all terms
            compared = comparisons[at]
            if compared.difference is None:
                continue
            tone = ("good" if compared.verdict == better else "bad") if compared.is_resolved else ""
            rows.append(
                {
                    "label": label,
                    "mean": compared.difference.mean,
                    "margin": compared.difference.margin,
                    "text": with_margin(compared.difference, signed=True),
                    "tone": tone,
                }
            )
        if rows:
            charts.append({"title": column, "better": better, "unit": "", "rows": rows})
    return charts
