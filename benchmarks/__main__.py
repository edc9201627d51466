"""Run the benchmarks: all of them, and write their page; or those named on the command line."""

from __future__ import annotations

import sys
from importlib import import_module

from benchmarks import page
from benchmarks.measure import CONSOLE, SHOWN

NAMES = (
    "composition",
    "execution",
    "telemetry",
    "memory",
    "penalties",
    "engine",
    "regularizers",
    "integrations",
    "scaling",
    "optim",
)


def main() -> None:
    names = tuple(sys.argv[1:]) or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]!r}: choose among {', '.join(NAMES)}")
    CONSOLE.print(page.machine())
    sys.argv = sys.argv[:1]
    for name in names:
        import_module(f"benchmarks.{name}").main()
    if names == NAMES:
        page.write(SHOWN)
        page.update_readme(SHOWN)
        CONSOLE.print(f"written to {page.PAGE.relative_to(page.ROOT)}, and the table in README.md")


main()
