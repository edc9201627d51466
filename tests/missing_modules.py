"""Run code in new interpreters, without modules that are then not installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def python(code: str) -> str:
    """Text that `code` prints in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def errors_without(modules: Sequence[str], before: str, *attempts: str) -> dict[str, list[str]]:
    """Errors of each attempt without each module, from forks of one interpreter.

    Args:
        modules: modules that are not installed, one at a time.
        before: statement that the interpreter runs before it forks.
        attempts: statements of which each must raise `MissingExtraError`.
    """
    code = f"""
import os, sys
from steelyard.errors import MissingExtraError
{before}
for module in {list(modules)}:
    if os.fork() == 0:
        sys.modules[module] = None
        for attempt in {list(attempts)}:
            try:
                exec(attempt)
            except MissingExtraError as error:
                print(module, error, sep=": ", flush=True)
        os._exit(0)
    os.wait()
"""
    lines = [line.partition(": ") for line in python(code).splitlines()]
    return {module: [error for name, _, error in lines if name == module] for module in modules}
