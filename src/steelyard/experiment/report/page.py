"""Render the report as one self-contained HTML page."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from steelyard._version import __version__
from steelyard.experiment.flags import FLAGS
from steelyard.experiment.report import charts, compare_charts, formatting, search_charts, sentences
from steelyard.experiment.report.ablation_table import AblationTable, ablation_table
from steelyard.experiment.report.answers import Answers, collect_answers
from steelyard.experiment.report.config_diff import (
    config_differences,
    format_setting,
    top_level_settings,
)
from steelyard.experiment.report.driving_examples import driving_examples
from steelyard.experiment.report.figure import Section
from steelyard.experiment.report.load import Experiment, LoadedRun
from steelyard.experiment.report.metrics import Findings, findings
from steelyard.experiment.report.run_history import run_history
from steelyard.experiment.report.samples import collect_samples

_MAX_VALUES = 4  # of a setting, named in the header; more are counted


def page(experiment: Experiment) -> str:
    """HTML of the report of an experiment."""
    runs = experiment.runs
    found = [findings(run) for run in runs]
    first = found[0]
    ablation = ablation_table(experiment)
    sections = _sections(experiment, found, ablation)
    plotly, script = get_plotlyjs(), _text("page.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "cosine": formatting.cosine,
        "number": formatting.number,
        "with_margin": formatting.with_margin,
        "percent": formatting.percent,
        "seconds": formatting.seconds,
        "skip_count": formatting.skip_count,
        "skip_reasons": formatting.skip_reasons,
        "space": formatting.format_space,
        "top_level_settings": top_level_settings,
        "setting": format_setting,
    }
    return environment.from_string(_text("page.html")).render(
        title=_title(experiment),
        facts=_facts(runs, found),
        runs=runs,
        found=found,
        flags=FLAGS,
        skipping=any(each.skipping for each in found),
        search=experiment.search,
        sentences=sentences_of(experiment, found),
        slowest=first.extreme("seconds", max),
        strongest=first.strongest,
        opposed=first.extreme("cosine", min),
        ablation=ablation,
        sections=sections,
        drivers=driving_examples(runs[0]) if len(runs) == 1 and not experiment.search else {},
        answers=collect_answers(runs[0]) if len(runs) == 1 and not experiment.search else Answers(),
        samples=collect_samples([] if experiment.search else runs),
        differences=config_differences(runs),
        figures=charts_json(sections),
        plotly=plotly,
        script=script,
        css=_text("page.css"),
        policy=_content_security_policy(plotly, script),
        version=__version__,
    )


def _sections(
    experiment: Experiment, found: Sequence[Findings], ablation: AblationTable | None
) -> list[Section]:
    runs = experiment.runs
    if experiment.search is not None:
        return search_charts.sections(experiment.search)
    if len(runs) == 1:
        return charts.sections(runs[0], found[0])
    effects = [compare_charts.effects(ablation)] if ablation is not None else []
    sections = [*effects, *compare_charts.sections(runs, found)]
    return [section for section in sections if section.figures]


def sentences_of(experiment: Experiment, found: Sequence[Findings]) -> list[str]:
    """Sentences of the first paragraph of the report."""
    runs = experiment.runs
    if experiment.search is not None:
        return search_charts.summarize_search(experiment.search, runs[0])
    if len(runs) == 1:
        return [*sentences.summarize(found[0]), *run_history(runs[0].folder)]
    if len(experiment.seeds) > 1:
        count = sum(map(len, experiment.seeds.values()))
        return [
            f"{count} runs: {len(runs)} variants, {len(experiment.seeds)} seeds.",
            "This table, and the charts of single runs, show the runs with the first seed.",
        ]
    return sentences.summarize_runs(runs, found)


def charts_json(sections: Sequence[Section]) -> str:
    """JSON of the charts, escaped so that it is safe inside a script element."""
    figures = [
        {
            "key": figure.key,
            "size": figure.size,
            "height": figure.height,
            "data": figure.traces,
            "layout": figure.layout,
        }
        for section in sections
        for figure in section.figures
    ]
    text = json.dumps(_without_nan(figures), allow_nan=False, separators=(",", ":"))
    # In JSON these characters occur only inside strings, where \\u escapes mean the same. Without
    # them no name can end the script element with "</script>" or open a comment in it.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _without_nan(value: Any) -> Any:
    """Replace NaN and infinities by None: JSON has neither, and Plotly draws None as a gap."""
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _content_security_policy(*scripts: str) -> str:
    """Content security policy: only these scripts run, by their SHA-256, and nothing is loaded.

    Inline styles are allowed since Plotly sets them; images only as data, for its download button.
    """
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _title(experiment: Experiment) -> str:
    names = [run.name for run in experiment.runs]
    if experiment.search is not None:
        return f"Search: {experiment.search.folder.resolve().name}"
    if experiment.full is not None:
        return f"Ablation: {experiment.runs[0].folder.resolve().parent.name}"
    return names[0] if len(names) == 1 else f"{len(names)} runs compared"


def _facts(runs: Sequence[LoadedRun], found: Sequence[Findings]) -> list[str]:
    """Facts of the header; where runs differ, all of their values."""
    models = [run.config.get("model") or {} for run in runs]
    facts = []
    for key in ("base_model", "rank", "backend"):
        # In the order of the runs; a run of another tool may lack a setting.
        values = [str(m[key]) for m in models if m.get(key) is not None]
        distinct = list(dict.fromkeys(values))
        text = formatting.join_names(distinct)
        if len(distinct) > _MAX_VALUES:
            text = f"{len(distinct)} {key.replace('_', ' ')}s"
        elif key != "base_model":
            text = f"{key} {text}"
        facts += [text] if distinct else []
    facts.append(_count([len(each.terms) for each in found], "regularizer"))
    if any(run.rewards for run in runs):
        facts.append(_count([len(run.rewards) for run in runs], "reward"))
    times = [time for run in runs for time in run.series("time")[1] if math.isfinite(time)]
    if times:
        facts.append(f"{datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M} UTC")
    return facts


def _count(counts: Sequence[int], noun: str) -> str:
    low, high = min(counts), max(counts)
    if low < high:
        return f"{low} to {high} {noun}s"
    return f"{low} {noun}{'s' if low != 1 else ''}"


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
