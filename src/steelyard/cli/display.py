"""Run a command that takes long, with a display and with Ctrl-C handled."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from transformers.utils import logging as transformers_logging

from steelyard.cli.interruption import Interruption
from steelyard.cli.live_display import LiveDisplay
from steelyard.cli.text_display import TextDisplay
from steelyard.experiment import Watcher

T = TypeVar("T")

_STOPPING = "Finishing this step, then saving. Ctrl-C again ends at once."


def run_with_display(run: Callable[[Watcher, Callable[[], bool]], T]) -> T:
    """Return the result of `run(watch, stop)`; `stop()` is True once Ctrl-C was pressed.

    The display is live on a terminal, plain lines otherwise.
    """
    # A second progress bar would break the live display.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    display = LiveDisplay(Console()) if sys.stdout.isatty() else TextDisplay()
    with Interruption(lambda: display.say(_STOPPING), display.restore) as interruption, display:
        return run(display, interruption.requested)


def default_run_folder(config: Path) -> Path:
    """Folder of a run for which none was given: `runs/<config>-<time>`."""
    return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
