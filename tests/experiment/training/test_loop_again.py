"""Train a run, or resume it."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.experiment import RunFolder, train
from steelyard.experiment.run.log import SilentWatcher
from steelyard.experiment.training.loop import train_or_resume
from tests.experiment.small_runs import Recorder, small_config, without_clock


def test_a_run_is_trained_then_resumed_then_left_as_it_is(folder: Path) -> None:
    config, path = small_config(folder), folder / "run"
    stops = iter([False, True])
    first = train_or_resume(config, path, watch=SilentWatcher(), stop=lambda: next(stops))
    assert (first.status, first.steps) == ("interrupted", 1)
    assert train_or_resume(config, path, watch=SilentWatcher(), stop=lambda: False).steps == 3
    recorder = Recorder()
    assert train_or_resume(config, path, watch=recorder, stop=lambda: False).status == "done"
    assert recorder.steps == []
    train(config, folder / "whole")
    runs = (RunFolder(folder / name).metrics() for name in ("run", "whole"))
    resumed, whole = ([without_clock(line) for line in lines] for lines in runs)
    assert resumed == whole


def test_a_run_of_another_config_is_not_resumed(folder: Path) -> None:
    train(small_config(folder), folder / "run", stop=lambda: True)
    other = small_config(folder, "train.steps=4", "train.seed=1")
    rule = r"run must be new or hold a run of this config, .* with another train\.steps: choose"
    with pytest.raises(RunError, match=rule):
        train_or_resume(other, folder / "run", watch=SilentWatcher(), stop=lambda: False)
