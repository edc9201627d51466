"""Warm-up and decay of the learning rate, against the schedulers of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from steelyard.errors import ConfigError
from steelyard.experiment import RunFolder, train
from steelyard.experiment.config_train import TrainConfig
from steelyard.experiment.learning_rate import learning_rate_of
from steelyard.spec import Schedule

from .small_runs import small_config

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
    theirs = get_scheduler(NAMES[decay], optimizer, warmup, 10)
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
