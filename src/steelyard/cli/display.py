"""Who looks on, and how a run that can be stopped is run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from transformers.utils import logging as transformers_logging

from steelyard.cli.interruption import Interruption
from steelyard.cli.live_display import Display
from steelyard.cli.text_display import Plain
from steelyard.experiment import Watcher

T = TypeVar("T")

_ASKED = "Finishing this step, then saving. Ctrl-C again ends at once."


def watched(go: Callable[[Watcher, Callable[[], bool]], T]) -> T:
    """What `go(watch, stop)` gives, with a display that suits the output, and Ctrl-C heard."""
    # A bar of its own would tear the display.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    display = Display(Console()) if sys.stdout.isatty() else Plain()
    with Interruption(lambda: display.say(_ASKED), display.restore) as interruption, display:
        return go(display, interruption.asked)


def fresh_folder(config: Path) -> Path:
    """A folder for a run that was given none: `runs/<config>-<time>`."""
    return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
