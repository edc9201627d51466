"""The learning rate: its default by the size of the model, warm-up and decay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from steelyard.engine import tiny
from steelyard.engine.model_sources import ModelSource, architecture
from steelyard.errors import ConfigError, ModelError
from steelyard.experiment import RunFolder, read_config, request_settings, resume, train
from steelyard.experiment.config.schema import LossConfig, ModelConfig
from steelyard.experiment.config.train_table import TrainConfig
from steelyard.experiment.training.learning_rate import (
    default_learning_rate,
    learning_rate_of,
    with_learning_rate,
)
from steelyard.spec.protocol import Schedule
from tests.experiment.small_runs import (
    Recorder,
    lines,
    small_config,
    small_rollouts,
    stop_after,
    write_data,
)

NAMES = {"none": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def schedule(**keys: object) -> Schedule:
    rate = learning_rate_of(TrainConfig.model_validate(keys))
    assert callable(rate)
    return rate


@pytest.mark.parametrize("decay", NAMES)
@pytest.mark.parametrize("warmup", [1, 4, 10])
def test_the_rates_are_those_of_the_hugging_face_trainer(decay: str, warmup: int) -> None:
    """transformers 5: `get_scheduler`, stepped after each optimizer step."""
    ours = schedule(learning_rate=3e-4, steps=10, warmup_steps=warmup, decay=decay)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=3e-4)
    theirs = transformers.get_scheduler(NAMES[decay], optimizer, warmup, 10)
    for step in range(10):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-18)
        optimizer.step()
        theirs.step()


def test_a_decay_ends_at_its_fraction_of_the_peak() -> None:
    rate = schedule(learning_rate=2.0, steps=8, decay="cosine", decay_to=0.1)
    assert (rate(0), rate(4), rate(8)) == pytest.approx((2.0, 1.1, 0.2))


def test_without_warmup_and_decay_the_rate_is_as_given() -> None:
    assert learning_rate_of(TrainConfig(learning_rate=0.5)) == 0.5
    assert schedule(learning_rate={"linear": [1.0, 0.0, 4]})(1) == 0.75


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.warmup_steps=4", "[train] must have at most train.steps = 3 as warmup_steps"),
        (
            "train.learning_rate={ warmup = [0.1, 2] }",
            "[train] must have a number as learning_rate",
        ),
        ("train.decay=linea", "[train]: decay must be one of 'none', 'linear' or 'cosine'"),
        ("train.decay_to=2", "[train]: decay_to must be <= 1, got 2"),
    ],
)
def test_bad_settings_are_refused(folder: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small_config(folder, "train.decay=cosine", override)
    assert str(caught.value).startswith(message)


def test_a_run_logs_the_rate_of_each_step(folder: Path) -> None:
    overrides = ("train.steps=4", "train.warmup_steps=2", "train.decay=linear")
    train(small_config(folder, *overrides, "train.learning_rate=1e-3"), folder / "r")
    rates = [line["optim/learning_rate"] for line in RunFolder(folder / "r").metrics()]
    assert rates == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("meta-llama/Llama-3.1-8B", 2.9e-4),  # 2.856e-4 in tinker-cookbook at commit 9dfcc3a
        ("Qwen/Qwen3-8B", 4.7e-4),  # 4.729e-4 there
        ("openai/gpt-oss-20b", 2.9e-4),  # which it does not know
        ("smollm2-135m", 1.3e-3),  # on `steelyard serve`
    ],
)
def test_a_model_on_a_service_is_known_by_its_name(name: str, rate: float) -> None:
    assert default_learning_rate(ModelConfig(backend="tinker", base_model=name)) == rate


@pytest.mark.parametrize("table", ["rollouts", "dpo", "data"])
def test_answers_and_pairs_have_a_tenth_of_it(folder: Path, table: str) -> None:
    config = small_config(folder)
    if table == "rollouts":
        config = small_rollouts(folder)
    if table == "dpo":
        config = config.model_copy(update={"loss": LossConfig(use="dpo")})
    train = config.train.model_copy(update={"learning_rate": None})
    resolved = with_learning_rate(config.model_copy(update={"train": train}))
    assert resolved.train.learning_rate == (7.4e-3 if table == "data" else 7.4e-4)
    assert with_learning_rate(resolved) is resolved


def saved_model(folder: Path, **config: Any) -> ModelConfig:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(base_model=str(folder))


@pytest.mark.parametrize(
    ("family", "size", "rate"),
    [
        ("llama", 2048, 4.9e-4),
        ("llama", 8192, 1.7e-4),
        ("qwen2", 8192, 4.5e-4),
        ("mistral", 8192, 1.7e-4),  # the smaller of the two
        ("mistral", 1024, 5.3e-4),
        ("gpt2", 768, 5.4e-4),  # whose config calls it n_embd
    ],
)
def test_the_default_follows_the_hidden_size(
    tmp_path: Path, family: str, size: int, rate: float
) -> None:
    key = "n_embd" if family == "gpt2" else "hidden_size"
    model = saved_model(tmp_path / "m", model_type=family, **{key: size})
    assert default_learning_rate(model) == rate


def test_a_model_without_a_hidden_size_needs_a_learning_rate() -> None:
    source = ModelSource("m", tiny.build, tiny.tokenizer, None, transformers.PretrainedConfig)
    with pytest.raises(ModelError, match=r"it has none: set train\.learning_rate\."):
        architecture(source)


def test_an_unknown_model_is_an_error_of_the_config() -> None:
    with pytest.raises(ConfigError, match=r"^\[model\]: base_model must be a known name"):
        default_learning_rate(ModelConfig(base_model="no-such"))


def default_config(folder: Path) -> Any:
    write_data(folder / "train.jsonl", lines(8))
    raw = {
        "model": {"base_model": "tiny-random", "rank": 2},
        "data": {"path": "train.jsonl", "max_length": 48},
        "train": {"steps": 3, "batch_size": 2},
    }
    return read_config(raw, folder=folder)


def test_a_run_records_its_default_and_keeps_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    train(default_config(folder), folder / "r", watch=recorder, stop=stop_after(1))
    run = RunFolder(folder / "r")
    assert run.config().train.learning_rate == 0.0074
    said = "learning rate 0.0074, by the size of tiny-random: train.learning_rate sets another"
    assert said in recorder.messages
    assert said in (folder / "r" / "log.txt").read_text()
    monkeypatch.setattr("steelyard.experiment.training.learning_rate._RATE", 1.0)
    resume(folder / "r")
    assert {row["optim/learning_rate"] for row in run.metrics()} == {0.0074}


def test_a_run_cannot_be_set_to_the_default_while_it_goes_on(folder: Path) -> None:
    train(default_config(folder), folder / "r", stop=lambda: True)
    with pytest.raises(ConfigError, match="learning_rate must be a number >= 0 or a schedule, got"):
        request_settings(folder / "r", {"learning_rate": None})
