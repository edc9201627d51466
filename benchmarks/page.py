"""The page `docs/benchmarks.md`, written from what a run measured."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from benchmarks.measure import Shown

RESULTS = Path(__file__).parent / "results"  # of machines that `make bench` does not run on
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PACKAGES = ("steelyard", "torch", "numpy", "jax", "transformers", "peft", "tinker", "torchjd")
MARKS = {True: "met", False: "**missed**", None: ""}


def machine() -> str:
    """The machine and the versions, in a line."""
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores ({_processor()}), {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, {', '.join(_versions())}"
    )


def write(tables: list[Shown], command: str) -> None:
    """Write the page of these tables."""
    today = dt.datetime.now(tz=dt.UTC).date()
    lines = [
        "# Benchmarks",
        "",
        (
            f"Written by `{command}` on {today}; do not edit. Figures are ratios within one run, "
            "each way timed in turn with the others, median of the repeats with the quartiles in "
            "brackets: machines are noisy, ratios less so. A target that was missed says so."
        ),
        "",
        machine() + ".",
        "",
    ]
    for table in tables:
        lines += _lines(table)
    for path in sorted(RESULTS.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        where = f"Measured on {kept['date']} by `{kept['command']}`: {kept['machine']}."
        for each in kept["tables"]:
            table = Shown(**each)
            lines += _lines(replace(table, notes=[where, *table.notes]))
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _lines(table: Shown) -> list[str]:
    title, _, conditions = table.title.partition(": ")
    lines = [f"## {title}", "", conditions[:1].upper() + conditions[1:] + ".", ""]
    lines += ["| what | measured | target | |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {measured} | {target} | {MARKS[met]} |"
        for what, measured, target, met in table.rows
    ]
    return [*lines, "", *table.notes, ""]


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
