"""The demo from its start to its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from steelyard.experiment.config_io import read_config
from steelyard.experiment.demo.validator import Validator
from steelyard.experiment.report import summary, write_report
from steelyard.experiment.training_loop import Outcome, Watcher, train

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Demo:
    """What came of the demo.

    Attributes:
        outcome: how the run ended.
        report: the page about it; None if it was stopped before its first step.
        summary: the gist of that page, sentence by sentence.
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
    """Train the demo's model, with the demo's validator beside it, and write the report.

    Args:
        folder: the run folder, a new one; the report is `report.html` in it.
        overrides: `key=value`, as for `steelyard train`.
        watch: who is told of each step.
        stop: asked before each step; when it says True the run saves and ends.

    Raises:
        ConfigError: an override breaks a rule.
        ModelError: the model cannot be had.
        RunError: the folder holds a run already.
    """
    with Validator(_HERE / "data.jsonl") as validator:
        address = f'regularizers.reviewer.options.url="{validator.url}"'
        config = read_config(_HERE / "config.toml", [address, *overrides])
        outcome = train(config, folder, watch=watch, stop=stop)
    if not outcome.steps:
        return Demo(outcome, None, [])
    report = write_report([outcome.folder], outcome.folder / "report.html")
    return Demo(outcome, report, summary(outcome.folder))
