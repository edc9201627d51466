"""The report as one HTML page that needs nothing else."""

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
from steelyard.experiment.report import charts, compare_charts, formatting
from steelyard.experiment.report.ablation_table import ablation_table
from steelyard.experiment.report.config_diff import differences, others, setting
from steelyard.experiment.report.figure import Section
from steelyard.experiment.report.findings import Findings, findings
from steelyard.experiment.report.load import Experiment, LoadedRun
from steelyard.experiment.report.samples import paired


def page(experiment: Experiment) -> str:
    """The report of an experiment, as HTML."""
    runs = experiment.runs
    found = [findings(run) for run in runs]
    one = found[0]
    alone = len(runs) == 1
    shown = charts.sections(runs[0], one) if alone else compare_charts.sections(runs, found)
    plotly, script = get_plotlyjs(), _text("page.js")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "cosine": formatting.cosine,
        "number": formatting.number,
        "percent": formatting.percent,
        "seconds": formatting.seconds,
        "skips": formatting.skips,
        "counted": formatting.counted,
        "others": others,
        "setting": setting,
    }
    return environment.from_string(_text("page.html")).render(
        title=_title(experiment),
        facts=_facts(runs, one),
        runs=runs,
        found=found,
        flags=FLAGS,
        skipping=any(each.skipping for each in found),
        sentences=formatting.sentences(one) if alone else formatting.compared(runs, found),
        slowest=one.extreme("seconds", max),
        strongest=one.extreme("share", max),
        opposed=one.extreme("cosine", min),
        ablation=ablation_table(experiment),
        sections=shown,
        samples=paired(runs),
        differences=differences(runs),
        figures=embedded(shown),
        plotly=plotly,
        script=script,
        css=_text("page.css"),
        policy=_policy(plotly, script),
        version=__version__,
    )


def embedded(sections: Sequence[Section]) -> str:
    """The charts as JSON that is safe inside a script element."""
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
    text = json.dumps(_finite(figures), allow_nan=False, separators=(",", ":"))
    # JSON knows < only within strings, so that no name can end the element or open another.
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """The same with a gap for what is not finite: JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _policy(*scripts: str) -> str:
    """What the page may do: run exactly these scripts, and ask nobody for anything."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
        f"img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _title(experiment: Experiment) -> str:
    names = [run.name for run in experiment.runs]
    if experiment.full is not None:
        return f"Ablation: {experiment.runs[0].folder.resolve().parent.name}"
    return names[0] if len(names) == 1 else f"{len(names)} runs compared"


def _facts(runs: Sequence[LoadedRun], found: Findings) -> list[str]:
    config = runs[0].config
    model = config.get("model") or {}
    facts = [
        str(model[key]) if key == "base_model" else f"{key} {model[key]}"
        for key in ("base_model", "rank", "backend")
        if model.get(key) is not None
    ]
    terms = len(found.terms)
    facts += [f"{terms} regularizer{'s' if terms != 1 else ''}"] if len(runs) == 1 else []
    times = [row["time"] for run in runs for row in run.rows if "time" in row]
    if times:
        facts.append(f"{datetime.fromtimestamp(max(times), UTC):%Y-%m-%d %H:%M} UTC")
    return facts


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
