"""Run the benchmarks named on the command line; without names run all, and write their page."""

from __future__ import annotations

import sys
from importlib import import_module

import torch

from benchmarks import page
from benchmarks.measure import CONSOLE, SHOWN

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
    every = (*NAMES, "gpu") if torch.cuda.is_available() else NAMES
    names = tuple(sys.argv[1:]) or every
    unknown = [name for name in names if name not in every]
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]!r}: choose among {', '.join(every)}")
    CONSOLE.print(page.machine())
    sys.argv = sys.argv[:1]
    for name in names:
        CONSOLE.print(f"[dim]{name} …")
        import_module(f"benchmarks.{name}").main()
    if names == every:
        tables = page.with_kept(SHOWN)
        page.write(tables)
        page.update_readme(tables)
        CONSOLE.print(f"written to {page.PAGE.relative_to(page.ROOT)}, and the table in README.md")


main()
