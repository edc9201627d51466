"""Write the report of runs to a file, and summarize a run in sentences."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from steelyard.errors import RunError
from steelyard.experiment.report.load import load_runs
from steelyard.experiment.report.metrics import findings
from steelyard.experiment.report.page import page, sentences_of


def summary(run: Path | str) -> list[str]:
    """Sentences that summarize a run: the first paragraph of its report.

    Raises:
        RunError: the folder is not that of one run.
    """
    experiment = load_runs([Path(run)])
    if experiment.seeds or experiment.search is not None:
        raise RunError(
            f"{run} must be the folder of one run, got that of an ablation or a search: give one "
            f"of the run folders in it."
        )
    return sentences_of(experiment, [findings(each) for each in experiment.runs])


def write_report(runs: Sequence[Path | str], target: Path | str) -> Path:
    """Write one self-contained HTML file about runs, and return its path.

    The report of one run shows every term; the charts of several runs, or of an ablation, have
    one line per run. The file loads nothing over the network.

    Args:
        runs: run folders, or the folder of an ablation or of a search.
        target: the file to write; an existing one is replaced.

    Raises:
        RunError: a folder is not a run, or the file cannot be written.
    """
    html = page(load_runs([Path(run) for run in runs]))
    path = Path(target)
    # Written beside the target and renamed, which is atomic: a reader never sees half a page.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder name that is not UTF-8, or a text cut inside a pair of UTF-16 surrogates, has
        # characters that cannot be encoded: they become question marks.
        temporary.write_text(html, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a folder that cannot be written holds none
            temporary.unlink()
        raise RunError(f"the report cannot be written to {path}: {error}.") from error
    return path
