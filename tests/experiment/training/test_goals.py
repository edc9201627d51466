"""Early stopping and the best checkpoint: by hand, and in runs that are stopped and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import peft
import pytest
import safetensors.torch
import torch

from steelyard.engine import tiny
from steelyard.errors import ConfigError, RunError
from steelyard.experiment import (
    Evaluation,
    RunFolder,
    export_run,
    open_trained_model,
    resume,
    train,
)
from steelyard.experiment.config.train_table import StopConfig, TrainConfig
from steelyard.experiment.run.checkpoints import BestCheckpoint, best_checkpoint, find_checkpoint
from steelyard.experiment.training.goals import BestValue, RunGoals
from steelyard.experiment.training.steps import TrainingSteps
from tests.engine.server.wire_client import start
from tests.experiment.small_runs import (
    Recorder,
    small_config,
    small_rollouts,
    stop_after,
    without_clock,
)

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
    goals = RunGoals.of(TrainConfig(), [])
    assert (goals.best, goals.stop, goals.result()) == (None, None, {})


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


# The loss falls, and then the learning rate makes it rise.
RISING = (
    "train.steps=7",
    "train.batch_size=6",
    "train.save_every=0",
    "train.keep=1",
    "data.held_out=0",
    "train.learning_rate={ piecewise = { 0 = 0.01, 3 = 0.5 } }",
)
BEST_LOSS = "train.keep_best=base_loss/value"


def loss_of(folder: Path, adapter: Path) -> float:
    """NLL per token of the completions of the data, by transformers and peft."""
    model = peft.PeftModel.from_pretrained(tiny.build(torch.float32), adapter).eval()
    total, count = 0.0, 0
    for line in (folder / "train.jsonl").read_text().splitlines():
        record = json.loads(line)
        prompt, answer = record["prompt"].encode(), record["completion"].encode()
        letters = tiny.tokenizer().encode(record["prompt"] + record["completion"])
        tokens = torch.tensor([[*letters, model.config.eos_token_id]])
        assert len(letters) == len(prompt) + len(answer)
        targets = torch.full_like(tokens, -100)
        targets[0, len(prompt) :] = tokens[0, len(prompt) :]
        with torch.no_grad():
            mean = model(tokens, labels=targets).loss
        total += float(mean) * (len(answer) + 1)
        count += len(answer) + 1
    return total / count


def adapter_of(run: RunFolder, step: int | Literal["best"]) -> Path:
    return run.checkpoints / find_checkpoint(run, step).path.removeprefix("tinker://")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load((folder / "adapter_model.safetensors").read_bytes())


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_best_checkpoint_has_the_weights_that_its_metric_was_measured_with(
    folder: Path, parts: int
) -> None:
    sizes = (f"train.gradient_accumulation_steps={parts}", f"train.batch_size={12 // parts}")
    run = RunFolder(folder / "r")
    train(small_config(folder, *RISING, *sizes, BEST_LOSS), run.path)
    losses = [line["base_loss/value"] for line in run.metrics()]
    best = best_checkpoint(run)
    assert best is not None
    assert 0 < best.step < 6, "neither the first nor the last"
    assert best.value == min(losses) == losses[best.step]
    assert (run.result() or {})["best"] == {
        "steps": best.step,
        "metric": "base_loss/value",
        "value": best.value,
    }
    assert loss_of(folder, adapter_of(run, "best")) == pytest.approx(best.value, rel=1e-5)
    # A run of so many steps ends with these weights.
    shorter = f"train.steps={best.step}"
    train(small_config(folder, *RISING, *sizes, shorter), folder / "shorter")
    last = weights_in(folder / "shorter" / "adapter")
    assert equal(weights_in(adapter_of(run, "best")), last)
    with open_trained_model(run.path, "best") as model:
        assert model.checkpoint.step == best.step
    written, _ = export_run(run.path, folder / "exported", step="best")
    assert equal(weights_in(written), last)
    states = [path.name for path in run.checkpoints.glob("*/weights/[!.]*")]
    assert sorted(states) == [f"best-{best.step:08d}", "step-00000007"]


def test_the_value_of_the_untrained_model_is_never_the_best(folder: Path) -> None:
    def best_of(name: str, *more: str) -> BestCheckpoint | None:
        run = RunFolder(folder / name)
        high = ("train.batch_size=10", "train.learning_rate=0.5")
        train(small_config(folder, *RISING, *high, *more), run.path)
        values = [line[more[0].partition("=")[2]] for line in run.metrics()]
        assert values[0] == min(values)
        return best_checkpoint(run)

    trained = best_of("trained", BEST_LOSS)
    held_out = ("data.held_out=0.2", "train.evaluate_every=1")
    evaluated = best_of("evaluated", "train.keep_best=held_out/loss", *held_out)
    for name, best, completed in (("trained", trained, 0), ("evaluated", evaluated, 1)):
        lines = RunFolder(folder / name).metrics()
        assert best is not None
        later = {line["step"]: line[best.metric] for line in lines[1:]}
        assert best.value == min(later.values())
        assert later[best.step - completed] == best.value
    train(small_config(folder, BEST_LOSS, "train.steps=1"), folder / "one")
    assert best_checkpoint(RunFolder(folder / "one")) is None


def test_with_several_updates_the_weights_before_the_first_are_the_best(tmp_path: Path) -> None:
    # The metric is a mean over the updates, so all candidates are saved, and deleted again.
    metric = "train.keep_best={ metric = 'base_loss/value', mode = 'max' }"
    settings = ("rollouts.substeps=2", "train.steps=4", "train.save_every=0")
    run = RunFolder(tmp_path / "r")
    train(small_rollouts(tmp_path, *settings, metric), run.path)
    best = best_checkpoint(run)
    assert best is not None
    values = [line["base_loss/value"] for line in run.metrics()]
    assert best.value == max(values[1:]) == values[best.step]
    train(small_rollouts(tmp_path, *settings, f"train.steps={best.step}"), tmp_path / "shorter")
    last = weights_in(tmp_path / "shorter" / "adapter")
    assert equal(weights_in(adapter_of(run, "best")), last)
    assert len([*run.checkpoints.glob("best-*.json")]) == 1
    assert len([*run.checkpoints.glob("*/weights/best-*")]) == 1


def test_a_metric_of_the_answers_is_that_of_the_weights_before_the_update(tmp_path: Path) -> None:
    settings = ("rollouts.substeps=2", "train.steps=4", "train.save_every=0")
    run = RunFolder(tmp_path / "r")
    saved: list[str] = []

    class Watching(Recorder):
        def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
            super().step(step, steps, metrics)
            saved.append(max((p.stem for p in run.checkpoints.glob("best-*.json")), default=""))

    train(
        small_rollouts(tmp_path, *settings, "train.keep_best=rollouts/reward"),
        run.path,
        watch=Watching(),
    )
    rewards = [line["rollouts/reward"] for line in run.metrics()]
    # Known before the first update, so that only better ones are saved.
    best, expected = -math.inf, []
    for step, reward in enumerate(rewards):
        if step and reward > best:
            best, newest = reward, step
        expected.append(f"best-{newest:08d}" if step else "")
    assert saved == expected
    record = best_checkpoint(run)
    assert record is not None
    assert (record.value, record.step) == (best, newest)


@pytest.mark.parametrize("killed", [2, 4, 5])
def test_a_run_that_was_killed_in_an_update_keeps_the_same_best(
    folder: Path, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    config = small_config(folder, *RISING, BEST_LOSS, "train.save_every=3", "train.keep=2")
    train(config, folder / "whole")
    calls: list[int] = []
    original = TrainingSteps._update

    def update(self: TrainingSteps, output: Any, step: int) -> dict[str, Any]:
        calls.append(step)
        if step == killed and calls.count(step) == 1:
            raise OSError("the machine is gone")
        return original(self, output, step)

    monkeypatch.setattr(TrainingSteps, "_update", update)
    run, whole = RunFolder(folder / "r"), RunFolder(folder / "whole")
    with pytest.raises(OSError, match="the machine is gone"):
        train(config, run.path)
    if killed > 3:  # what is there is that of the checkpoint that it goes on from
        best = best_checkpoint(run)
        assert best is not None
        assert (best.step, weights_in(adapter_of(run, "best")).keys() > set()) == (2, True)
    assert resume(run.path).status == "done"
    assert best_checkpoint(run) == best_checkpoint(whole)
    assert equal(weights_in(adapter_of(run, "best")), weights_in(adapter_of(whole, "best")))
    names = [sorted(p.name for p in r.checkpoints.glob("*/weights/[!.]*")) for r in (run, whole)]
    assert names[0] == names[1]


def test_the_held_out_values_of_a_last_step_count(folder: Path) -> None:
    # Training stops by another metric, and the last step is evaluated although it is not due.
    stop = "train.stop_early={ metric = 'optim/learning_rate', mode = 'max', patience = 2 }"
    best = ("train.keep_best=held_out/loss", "train.evaluate_every=5", "train.steps=8")
    run = RunFolder(folder / "r")
    train(small_config(folder, stop, *best), run.path)
    found = best_checkpoint(run)
    assert found is not None
    assert (found.step, found.value) == (3, run.metrics()[-1]["held_out/loss"])
    assert RunGoals.of(run.config().train, run.metrics()).result()["best"]["steps"] == 3


def test_the_best_weights_of_a_run_on_a_service_are_there_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with start(folder / "served") as running:
        service = ("model.backend=tinker", f"model.base_url={running.base_url}")
        terms = {"use": "ema_drift", "name": "drift", "weight": 0.0}  # its state is saved here
        run = RunFolder(folder / "r")
        # 12 lines in a step: its loss is the sum over all of them.
        settings = (*RISING, "train.steps=5", "train.batch_size=12", BEST_LOSS)
        train(small_config(folder, *settings, *service, regularizers=[terms]), run.path)
        best = best_checkpoint(run)
        assert best is not None
        assert best.in_training
        adapter = folder / "served" / find_checkpoint(run, "best").path.removeprefix("tinker://")
        assert loss_of(folder, adapter) == pytest.approx(best.value, rel=1e-5)
        assert best.value == run.metrics()[best.step]["base_loss/value"]
