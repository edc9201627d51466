"""Freeze the page of a run, or of several, into one HTML file that asks nothing of anyone."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from steelyard._version import __version__
from steelyard.errors import RunError
from steelyard.experiment.page import content_security_policy
from steelyard.experiment.page.comparison import (
    COMPARED_GROUPS,
    baseline_of,
    compare_document,
    comparison_charts,
)
from steelyard.experiment.page.load import (
    METRICS,
    Experiment,
    LoadedRun,
    load_runs,
    read_config_file,
)
from steelyard.experiment.page.records import RECORDS
from steelyard.experiment.page.run_document import (
    Document,
    changes,
    curves_document,
    summary_document,
)
from steelyard.experiment.page.run_statistics import statistics_of
from steelyard.experiment.page.sentences import (
    finding_sentences,
    headline,
    run_history,
    summarize,
)
from steelyard.experiment.page.series import RunSeries
from steelyard.output.run_files import write_atomic

_STATIC = Path(__file__).parent / "static"
_POINTS = 500  # of a curve
_RECORDS = ("samples", "answers", "drivers", "config")
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/([^"]+)">')
_SCRIPT = re.compile(r'<script defer src="/static/([^"]+)"></script>')
_MODULE = re.compile(r'<script type="module" src="/static/([^"]+)"></script>')
_ICON = re.compile(r'<link rel="icon" href="/static/([^"]+)">')
_IMPORT = re.compile(r'^import [^;]*? from "\./([\w./-]+)";\n', re.MULTILINE)


def summary(run: Path | str) -> list[str]:
    """Sentences that summarize a run, the most important first.

    Raises:
        RunError: the folder is not that of one run.
    """
    experiment = load_runs([Path(run)])
    if experiment.seeds or experiment.search is not None:
        raise RunError(
            f"{run} must be the folder of one run, got that of an ablation or a search: give one "
            f"of the run folders in it."
        )
    (loaded,) = experiment.runs
    found = statistics_of(loaded)
    baseline = baseline_of(loaded.folder)
    changed = [f"From step {each['step']} on, {each['text']}." for each in changes(loaded.folder)]
    return [
        headline(loaded, found, None if baseline is None else baseline.sentence),
        *finding_sentences(found),
        *summarize(found),
        *changed,
        *run_history(loaded.folder),
    ]


def write_report(runs: Sequence[Path | str], target: Path | str) -> Path:
    """Write one self-contained HTML file about runs, and return its path.

    The file of one run shows every term; the charts of several runs, or of an ablation, have one
    line per run. It loads nothing over the network.

    Args:
        runs: run folders, or the folder of an ablation or of a search.
        target: the file to write; an existing one is replaced.

    Raises:
        RunError: a folder is not a run, or the file cannot be written.
    """
    content = freeze(load_runs([Path(run) for run in runs]))
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder name that is not UTF-8, or a text cut inside a pair of UTF-16 surrogates, has
        # characters that cannot be encoded: they become question marks.
        write_atomic(path, content.encode(errors="replace"))
    except OSError as error:
        raise RunError(f"the report cannot be written to {path}: {error}.") from error
    return path


def freeze(experiment: Experiment) -> str:
    """HTML of the page of one run, or of several, with its data, scripts and styles inside.

    The content security policy allows these scripts and styles, by their SHA-256, and no request.
    """
    one = experiment.runs[0] if len(experiment.runs) == 1 and not _is_compared(experiment) else None
    document: Document = {
        "version": __version__,
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "kind": "compare" if one is None else "run",
        **(_compared(experiment) if one is None else _alone(one)),
    }
    shown = document["compare"] if one is None else document["run"]
    parts: list[str] = []
    styles: list[str] = []
    scripts: list[str] = []

    def inline(kind: list[str], text: str, tag: str, attributes: str = "") -> str:
        kind.append(text)
        parts.append(f"<{tag}{attributes}>{text}</{tag}>")
        return f"\0{len(parts) - 1}\0"  # filled in last: a part may look like a reference

    page = _read("index.html")
    page = _ICON.sub('<link rel="icon" href="data:,">', page)
    page = _STYLE.sub(lambda m: inline(styles, _read(m[1]), "style"), page)
    page = _SCRIPT.sub(lambda m: inline(scripts, _script(_read(m[1])), "script"), page)
    page = _MODULE.sub(lambda m: inline(scripts, _bundle(m[1]), "script", ' type="module"'), page)
    policy = content_security_policy.frozen_page(scripts, styles)
    data = f'<script type="application/json" id="document">{_json(document)}</script>'
    # A policy holds for what follows it, so it stands first.
    head = (
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="generator" content="steelyard {__version__}">'
    )
    title = _escaped(f"{shown['title']} · Steelyard")
    page = page.replace('<meta charset="utf-8">', head, 1)
    page = re.sub("<title>.*?</title>", lambda _: f"<title>{title}</title>", page, count=1)
    page = re.sub("<noscript>.*?</noscript>", lambda _: _plain(shown), page, flags=re.DOTALL)
    page = page.replace("</body>", f"{data}\n</body>", 1)
    return re.sub("\0(\\d+)\0", lambda m: parts[int(m[1])], page)


def _is_compared(experiment: Experiment) -> bool:
    return bool(experiment.seeds) or experiment.search is not None


def _alone(run: LoadedRun) -> Document:
    found, series = statistics_of(run), run.curves()
    baseline = baseline_of(run.folder)
    sentence = None if baseline is None else baseline.sentence
    document = summary_document(run, found, series=series, baseline=sentence)
    document |= curves_document(series, run.config, points=_POINTS)
    about: Document = {
        "name": run.name,
        "title": run.name,
        "planned": found.planned,
        "state": _state(run),
        "relatives": {"parent": _parent(run), "branches": []},
        "baseline": None,
    }
    records = {kind: RECORDS[kind](run.folder) for kind in _RECORDS}
    records["config"]["text"] = ""  # the settings say the same
    return {"run": about | document, "records": records}


def _state(run: LoadedRun) -> str:
    if (run.folder / "result.json").is_file():
        return "done"
    return "stopped" if run.failure is None else "failed"


def _parent(run: LoadedRun) -> Document | None:
    branch = run.config.get("branch")
    if not isinstance(branch, dict):
        return None
    name, step = branch.get("run"), branch.get("step")
    return {"name": name, "step": step, "text": f"{name}, at step {step}"}


def _compared(experiment: Experiment) -> Document:
    names: dict[Path, str] = {}
    loaded = compare_document(experiment, lambda path: names.setdefault(path, str(len(names))))
    folders = {name: path for path, name in names.items()}
    views: dict[str, Any] = {}
    marks = []
    for run in loaded["runs"]:
        folder = folders[run["name"]]
        series = RunSeries(folder / METRICS)
        series.refresh()
        own = read_config_file(folder)
        views[run["name"]] = curves_document(series, own, groups=COMPARED_GROUPS, points=_POINTS)
        marks += [{**change, "run": run["name"]} for change in changes(folder)]
    charts = comparison_charts(loaded["runs"], views, loaded.pop("chart_notes"))
    return {"compare": loaded | {"charts": charts, "views": views, "changes": marks}}


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _bundle(name: str) -> str:
    """One script made of a module and of what it imports, each once, the imported ones first."""
    order: dict[str, str] = {}

    def add(module: str) -> None:
        if module in order:
            return
        text = _read(module)
        order[module] = ""  # in case two import each other
        for imported in _IMPORT.findall(text):
            add(imported)
        del order[module]
        body = _IMPORT.sub("", text)
        order[module] = re.sub(r"^export (?=[a-z])", "", body, flags=re.MULTILINE)

    add(name)
    return _script("\n".join(order.values()))


def _script(text: str) -> str:
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("a script of the page must not hold the end of a script element")
    return text


def _json(document: Document) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    # In JSON these characters occur only inside strings, where \\u escapes mean the same. Without
    # them no name can end the script element with "</script>" or open a comment in it.
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plain(document: Document) -> str:
    """Text for a reader without JavaScript: the sentences."""
    texts = [document["title"], document["headline"], *document["sentences"]]
    texts.append("The charts and tables need JavaScript, which is in this file.")
    paragraphs = "".join(f"<p>{_escaped(text)}</p>" for text in texts)
    return f"<noscript>{paragraphs}</noscript>"


def _escaped(text: str) -> str:
    return html.escape(text).replace("\0", "")
