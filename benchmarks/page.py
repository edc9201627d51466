"""Write `docs/benchmarks.md`, and the table in the README, from the measured tables."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.measure import Shown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"  # measured on other machines than that of `make bench`
README = ROOT / "README.md"
# A run replaces the text between these lines of the README.
BEGIN, END = "<!-- figures of `make bench` -->\n", "<!-- end of figures -->\n"
# Rows of the README: title of the table, beginning of the label, command that measures it.
FIRST = (
    ("Composition", "Pipeline, untracked", ".venv/bin/python -m benchmarks composition"),
    ("Composition", "Pipeline, all norms", ".venv/bin/python -m benchmarks composition"),
    ("Composition", "TorchJD", ".venv/bin/python -m benchmarks composition"),
    (
        "Composition",
        "every term evaluated three times",
        ".venv/bin/python -m benchmarks composition",
    ),
    ("Execution", "six pure-Python terms", ".venv/bin/python -m benchmarks execution"),
    ("Telemetry", "no handler attached", ".venv/bin/python -m benchmarks telemetry"),
    ("Engine", "one forward pass", ".venv/bin/python -m benchmarks engine"),
    ("In a training loop", "CompositeLoss", ".venv/bin/python -m benchmarks integrations"),
    ("Scaling", "terms", ".venv/bin/python -m benchmarks scaling"),
    ("Terms from logits on a GPU", "entropy: ours", "python -m benchmarks.gpu"),
    ("Terms from logits on a GPU", "four together: ours", "python -m benchmarks.gpu"),
    ("Terms from logits on a GPU", "four together, tracked: ours", "python -m benchmarks.gpu"),
    ("Terms from hidden states on a GPU", "compose_linear", "python -m benchmarks.gpu"),
)
MEASURED = "Measured on"
PACKAGES = ("steelyard", "torch", "numpy", "jax", "transformers", "peft", "tinker", "torchjd")
STATUS = {True: "met", False: "**missed**", None: ""}


def machine() -> str:
    """Description of the machine and the versions, in one line."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores ({processor()}), {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, {', '.join(_versions())}"
    )


def with_kept(tables: Sequence[Shown]) -> list[Shown]:
    """These tables, and the saved tables of other machines whose titles are not among them."""
    here, every = {table.title for table in tables}, list(tables)
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        where = f"{MEASURED} {kept['date']} by `{kept['command']}`: {kept['machine']}."
        found = (Shown(**each) for each in kept["tables"])
        every += [
            replace(table, notes=[where, *table.notes])
            for table in found
            if table.title not in here
        ]
    return every


def write(tables: Sequence[Shown]) -> None:
    """Write `docs/benchmarks.md` with these tables."""
    today = dt.datetime.now(tz=dt.UTC).date()
    lines = [
        "# Benchmarks",
        "",
        (
            f"Written by `make bench` on {today}; do not edit. Most results are ratios to a "
            "reference that is timed in turn with the others in the same run, because ratios vary "
            "less than times. Each is the median of the repeats, with the quartiles in brackets. "
            "Missed targets are marked."
        ),
        "",
        machine() + ".",
        "",
    ]
    for table in tables:
        lines += _lines(table)
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _lines(table: Shown) -> list[str]:
    lines = [f"## {table.title}", "", f"{table.conditions}.", ""]
    lines += ["| benchmark | measured | target | |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {measured} | {target} | {STATUS[met]} |"
        for what, measured, target, met in table.rows
    ]
    return [*lines, "", *table.notes, ""]


def update_readme(tables: Sequence[Shown]) -> None:
    """Put the rows listed in `FIRST` into the README, each with the command that measures it."""
    lines = ["| benchmark | measured | target | command |", "|---|---|---|---|"]
    shown = [table for table in tables if table.title in {title for title, _, _ in FIRST}]
    elsewhere = {note for table in shown for note in table.notes if note.startswith(MEASURED)}
    for title, begins, command in FIRST:
        rows = next(table.rows for table in tables if table.title == title)
        what, measured, target, met = next(row for row in rows if row[0].startswith(begins))
        missed = ", **missed**" if met is False else ""
        lines.append(f"| {title}: {what} | {measured} | {target}{missed} | `{command}` |")
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    figures = "\n".join([*lines, "", f"{machine()}.", *sorted(elsewhere), ""])
    README.write_text(f"{before}{BEGIN}{figures}{END}{after}", encoding="utf-8")


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """Name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
