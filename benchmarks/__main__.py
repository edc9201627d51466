"""Run the benchmarks named on the command line; without names run all, and write their page.

Each runs in a process of its own: one that shares its process with others is slower, by their
memory, threads and worker processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import page
from benchmarks.measure import CONSOLE, SHOWN, Shown

NAMES = (
    "composition",
    "execution",
    "ray_runs",
    "ray_terms",
    "telemetry",
    "memory",
    "penalties",
    "engine",
    "one_pass",
    "sampling",
    "on_policy",
    "regularizers",
    "integrations",
    "trl",
    "scaling",
    "optim",
    "watch",
)


def main() -> None:
    every = (*NAMES, "gpu", "engine_gpu") if torch.cuda.is_available() else NAMES
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(every))
    parser.add_argument("--tables", type=Path, help="run one benchmark here; save its tables")
    given = parser.parse_args()
    names = tuple(given.names) or every
    unknown = [name for name in names if name not in every]
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]!r}: choose among {', '.join(every)}")
    if given.tables is not None:
        sys.argv = sys.argv[:1]
        import_module(f"benchmarks.{names[0]}").main()
        given.tables.write_text(json.dumps([asdict(table) for table in SHOWN]), encoding="utf-8")
        return
    CONSOLE.print(page.machine())
    tables = [table for name in names for table in measure(name)]
    if names == every:
        tables = page.with_kept(tables)
        page.write(tables)
        page.update_readme(tables)
        CONSOLE.print(f"written to {page.PAGE.relative_to(page.ROOT)}, and the table in README.md")


def measure(name: str) -> list[Shown]:
    """Run a benchmark in a process of its own."""
    CONSOLE.print(f"[dim]{name} …")
    with tempfile.TemporaryDirectory() as folder:
        tables = Path(folder) / "tables.json"
        command = [sys.executable, "-m", "benchmarks", name, "--tables", str(tables)]
        if failed := subprocess.run(command, check=False).returncode:
            sys.exit(failed)
        return [Shown(**table) for table in json.loads(tables.read_text(encoding="utf-8"))]


main()
