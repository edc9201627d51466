"""Run the benchmarks: all of them, or those named on the command line."""

from __future__ import annotations

import os
import platform
import sys
from importlib import import_module

import torch

from benchmarks.measure import CONSOLE

NAMES = (
    "composition",
    "execution",
    "telemetry",
    "memory",
    "penalties",
    "engine",
    "regularizers",
    "integrations",
)


def main() -> None:
    names = tuple(sys.argv[1:]) or NAMES
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"unknown benchmark {unknown[0]!r}: choose among {', '.join(NAMES)}")
    CONSOLE.print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    sys.argv = sys.argv[:1]
    for name in names:
        import_module(f"benchmarks.{name}").main()


main()
