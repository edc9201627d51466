"""Run the demo: start its validator, train, and write the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from steelyard.experiment.config_io import read_config
from steelyard.experiment.demo.validator import Validator
from steelyard.experiment.report import summary, write_report
from steelyard.experiment.training_loop import Outcome, train
from steelyard.experiment.watcher import Watcher

_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Demo:
    """Result of the demo.

    Attributes:
        outcome: outcome of the run.
        report: path of the report; None if the run was stopped before its first step.
        summary: sentences that summarize the report.
    """

    outcome: Outcome
    report: Path | None
    summary: list[str]


def run_demo(
    folder: str | Path,
    overrides: Iterable[str] = (),
    *,
    watch: Watcher | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Demo:
    """Train the demo's model while its validator is running, and write the report.

    Args:
        folder: run folder, which must be new; the report is `report.html` in it.
        overrides: `key=value`, as for `steelyard train`.
        watch: notified of each step.
        stop: called before each step; when it returns True the run saves a checkpoint and ends.

    Raises:
        ConfigError: an override is invalid.
        ModelError: the model cannot be loaded.
        RunError: the folder already contains a run.
    """
    with Validator(_FOLDER / "data.jsonl") as validator:
        address = f'regularizers.reviewer.options.url="{validator.url}"'
        config = read_config(_FOLDER / "config.toml", [address, *overrides])
        with warnings.catch_warnings():
            # Its batches are small so that it takes a minute: the term is there to be seen.
            warnings.filterwarnings("ignore", "a batch has few data of a group")
            outcome = train(config, folder, watch=watch, stop=stop)
    if not outcome.steps:
        return Demo(outcome, None, [])
    report = write_report([outcome.folder], outcome.folder / "report.html")
    return Demo(outcome, report, summary(outcome.folder))
