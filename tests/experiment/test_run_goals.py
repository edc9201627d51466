"""Early stopping and the best checkpoint: by hand, and in runs that are stopped and resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError, RunError
from steelyard.experiment import Evaluation, RunFolder, open_trained_model, resume, train
from steelyard.experiment.checkpointing import best_checkpoint, find_checkpoint
from steelyard.experiment.config_train import StopConfig, TrainConfig
from steelyard.experiment.run_goals import BestValue, RunGoals

from .small_runs import Recorder, small_config, stop_after, without_clock

WAVE = [5.0, 3.0, 4.0, 2.0, 2.5, 2.25, 9.0, 9.0]


def wave(evaluation: Evaluation) -> float:
    """An evaluation with known values: of the base model, then after each step."""
    return WAVE[evaluation.step]


WAVE_ENTRY = f"evaluations=[{{ use = '{__name__}:wave' }}]"
STOP = "train.stop_early={ metric = 'eval/wave', mode = 'min', patience = 2 }"
BEST = "train.keep_best={ metric = 'eval/wave', mode = 'min' }"
EVERY = ("train.steps=8", "train.evaluate_every=1", "train.save_every=0", WAVE_ENTRY)


def seen(values: Sequence[float | None], **settings: Any) -> BestValue:
    best = BestValue(StopConfig.model_validate({"metric": "loss_total", **settings}))
    for step, value in enumerate(values):
        best.see({"step": step} if value is None else {"step": step, "loss_total": value})
    return best


@pytest.mark.parametrize(
    ("values", "settings", "value", "step", "waited"),
    [
        ([3.0, 2.0, 2.5], {}, 2.0, 1, 1),
        ([3.0, 2.0, 2.5], {"mode": "max"}, 3.0, 0, 2),
        ([3.0, None, None, 4.0], {}, 3.0, 0, 1),  # steps without a value do not count
        ([3.0, 2.9, 2.8], {"min_delta": 0.15}, 2.8, 2, 0),
        ([3.0, 2.9, 2.86], {"min_delta": 0.15}, 3.0, 0, 2),
        ([3.0, float("nan"), float("nan")], {}, 3.0, 0, 2),
        ([2.0, 2.0], {}, 2.0, 0, 1),  # not worse is not better
    ],
)
def test_the_best_value(
    values: list[float | None], settings: dict[str, Any], value: float, step: int, waited: int
) -> None:
    best = seen(values, **settings)
    assert (best.value, best.step, best.waited) == (value, step, waited)


def test_a_config_without_goals_has_none() -> None:
    assert RunGoals.of(TrainConfig(), []) is None


def test_a_run_stops_when_its_metric_has_not_improved(folder: Path) -> None:
    recorder = Recorder()
    outcome = train(small_config(folder, *EVERY, STOP), folder / "r", watch=recorder)
    # 3.0 (4.0) 2.0 (2.5, 2.25): the value before training, 5.0, does not count.
    assert (outcome.status, outcome.steps) == ("done", 6)
    result = RunFolder(folder / "r").result()
    assert result is not None
    message = "stopped early: eval/wave was best at step 3, 2, and 2 values since then not better"
    assert result["stopped_early"] == message
    assert message in recorder.messages
    assert resume(folder / "r").steps == 6
    assert find_checkpoint(RunFolder(folder / "r")).step == 6


def test_a_run_that_reaches_its_last_step_has_not_stopped_early(folder: Path) -> None:
    recorder = Recorder()
    config = small_config(folder, *EVERY, STOP, "train.steps=6")
    assert train(config, folder / "r", watch=recorder).steps == 6
    assert "stopped_early" not in (RunFolder(folder / "r").result() or {})
    assert not any("stopped early" in message for message in recorder.messages)


def test_the_last_step_of_a_run_that_stops_early_has_held_out_values(folder: Path) -> None:
    stop = "train.stop_early={ metric = 'optim/learning_rate', mode = 'max', patience = 2 }"
    train(small_config(folder, "train.steps=8", stop), folder / "r")
    lines = RunFolder(folder / "r").metrics()
    assert [line["step"] for line in lines if "held_out/loss" in line] == [0, 2]
    assert len(lines) == 3


def test_the_best_checkpoint_is_kept_beside_the_last_ones(folder: Path) -> None:
    run = RunFolder(folder / "r")
    train(small_config(folder, *EVERY, BEST, "train.keep=1", "train.save_every=3"), run.path)
    best = best_checkpoint(run)
    assert best is not None
    assert (best.step, best.metric, best.value) == (4, "eval/wave", 2.0)
    assert (run.result() or {})["best"] == {"steps": 4, "metric": "eval/wave", "value": 2.0}
    records = sorted(path.name for path in run.checkpoints.glob("step-*.json"))
    assert records == ["step-00000004.json", "step-00000008.json"]
    with open_trained_model(run.path, "best") as model:
        assert model.checkpoint.step == 4
    with pytest.raises(RunError, match="step must be that of a checkpoint"):
        open_trained_model(run.path, 3)


@pytest.mark.parametrize("steps", [2, 5])
def test_a_resumed_run_repeats_its_goals_to_the_same_bits(folder: Path, steps: int) -> None:
    config = small_config(folder, *EVERY, BEST, STOP)
    train(config, folder / "whole")
    assert train(config, folder / "r", stop=stop_after(steps)).status == "interrupted"
    assert resume(folder / "r").status == "done"
    runs = [RunFolder(folder / name) for name in ("whole", "r")]
    whole, resumed = ([without_clock(line) for line in run.metrics()] for run in runs)
    assert resumed == whole
    assert best_checkpoint(runs[0]) == best_checkpoint(runs[1])
    ends = [{k: v for k, v in (run.result() or {}).items() if k != "seconds"} for run in runs]
    assert ends[0]["stopped_early"] == ends[1]["stopped_early"]


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("held_out/los", "; did you mean held_out/loss?"),
        ("regularizers/l3/value", "; did you mean regularizers/l2/value?"),
        ("skies", "."),
    ],
)
def test_a_metric_that_no_step_has_is_an_error_of_the_first(
    folder: Path, metric: str, hint: str
) -> None:
    stop = f"train.stop_early={{ metric = '{metric}', mode = 'min' }}"
    with pytest.raises(RunError) as caught:
        train(small_config(folder, stop, "train.evaluate_every=1"), folder / "r")
    assert str(caught.value).endswith(f"and the first step has no {metric!r}{hint}")
    assert not RunFolder(folder / "r").holds_run  # it can start again there


def test_an_unknown_evaluation_is_an_error_before_the_model_is_loaded(folder: Path) -> None:
    recorder = Recorder()
    best = "train.keep_best={ metric='eval/wav', mode='max' }"
    config = small_config(folder, WAVE_ENTRY, "train.evaluate_every=1", best)
    with pytest.raises(ConfigError) as caught:
        train(config, folder / "r", watch=recorder)
    assert str(caught.value) == (
        "[train]: keep_best.metric must be that of an entry of [[evaluations]], here eval/wave, "
        "got 'eval/wav'; did you mean eval/wave?"
    )
    assert recorder.messages == []
    assert not (folder / "r").exists()


def test_without_held_out_data_the_error_says_so(folder: Path) -> None:
    stop = ("train.evaluate_every=1", "train.stop_early=held_out/loss")
    config = small_config(folder, "data.held_out=0", *stop)
    with pytest.raises(RunError, match=r"Nothing is held out in this run: see data\.held_out\."):
        train(config, folder / "r")


def test_whether_lower_is_better_must_be_known(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="must have mode = 'min' or 'max' for the metric 'eval/a'"
    ):
        small_config(folder, "train.stop_early=eval/a")
    stop = ("train.evaluate_every=1", "train.stop_early=held_out/reward")
    config = small_config(folder, *stop, "train.keep_best=loss_total")
    assert config.train.stop_early is not None
    assert config.train.stop_early.mode == "max"
    assert config.train.keep_best is not None
    assert config.train.keep_best.mode == "min"


def test_a_run_without_keep_best_has_no_best_checkpoint(folder: Path) -> None:
    train(small_config(folder), folder / "r")
    assert best_checkpoint(RunFolder(folder / "r")) is None
    with pytest.raises(RunError, match="must have a best checkpoint, and it has none"):
        open_trained_model(folder / "r", "best")


@pytest.mark.parametrize("key", ["stop_early", "keep_best"])
def test_a_metric_of_evaluations_needs_evaluations(folder: Path, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small_config(folder, f"train.{key}=held_out/loss")
    assert str(caught.value).startswith(f"[train] must have evaluate_every with {key}: its metric")
