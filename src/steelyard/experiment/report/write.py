"""Writing the report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from steelyard.errors import RunError
from steelyard.experiment.report.findings import findings
from steelyard.experiment.report.formatting import sentences
from steelyard.experiment.report.load import read
from steelyard.experiment.report.page import page


def summary(run: Path | str) -> list[str]:
    """What a run shows, in a few sentences: the beginning of its report.

    Raises:
        RunError: the folder is no run.
    """
    (found,) = read([Path(run)]).runs
    return sentences(findings(found))


def write_report(runs: Sequence[Path | str], target: Path | str) -> Path:
    """Write one self-contained HTML file about runs, and say where it is.

    One run is shown in full; of several, or of an ablation, the same charts have one line per
    run. The file needs no network: everything is in it.

    Args:
        runs: run folders, or the folder of an ablation.
        target: the file to write; it is replaced if it is there.

    Raises:
        RunError: a folder is no run, or the file cannot be written.
    """
    html = page(read([Path(run) for run in runs]))
    path = Path(target)
    # Written aside and moved: a reader never finds half a page.
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(html, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RunError(f"the report cannot be written to {path}: {error}.") from error
    return path
