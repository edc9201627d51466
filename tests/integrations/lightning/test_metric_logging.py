"""Components of a composite loss in the logs of the real Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard.errors import SpecError
from steelyard.integrations import CompositeLoss, term
from steelyard.integrations.lightning.steps import check_log_settings, log_components
from tests.integrations.lightning.models import Batch, Plain, Recorder, batches, trainer


class Failing:
    """A term that fails at every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            raise ConnectionError("no answer")
        return x.square().sum()


class Logs(Plain):
    """A module that calls `log_components` in every step."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.parameter = torch.nn.Parameter(torch.tensor(2.0))
        self.composite = CompositeLoss(
            lambda x: x.square(),
            [
                term(lambda x: 3 * x, 0.5, "rare", every=2),
                term(Failing(), 0.25, "failing", on_error="skip"),
            ],
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.composite.step = batch_idx
        total: Tensor = self.composite(x=self.parameter)
        log_components(self, self.composite, check_log_settings(self.settings))
        return total

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.parameter], lr=0.0)


class LogsEverywhere(Logs):
    validation_step = test_step = Logs.training_step


def test_sync_dist_is_on_unless_the_settings_have_it() -> None:
    assert check_log_settings({"on_epoch": True}) == {"sync_dist": True, "on_epoch": True}
    assert check_log_settings({"sync_dist": False}) == {"sync_dist": False}


def test_an_argument_that_log_dict_does_not_have_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"must be arguments of log_dict, got 'on_steps'; there are: .*on_step,"
    ):
        check_log_settings({"on_steps": True})


def test_a_term_that_did_not_run_is_logged_with_a_contribution_of_zero() -> None:
    recorder = Recorder()
    trainer(recorder, epochs=1).fit(Logs(), batches(1, 1, 1))
    rare = recorder.having("train/regularizers/rare/contribution")
    assert rare == pytest.approx([3.0, 0.0, 3.0])
    failing = recorder.having("train/regularizers/failing/contribution")
    assert failing == pytest.approx([1.0, 0.0, 1.0])
    assert recorder.having("train/loss_total") == pytest.approx([8.0, 4.0, 8.0])


def test_a_term_that_may_be_skipped_has_a_flag() -> None:
    recorder = Recorder()
    trainer(recorder, epochs=1).fit(Logs(), batches(1, 1, 1))
    assert recorder.having("train/skipped/failing") == [0.0, 1.0, 0.0]
    assert recorder.having("train/skipped/rare") == []


def test_the_stage_is_the_prefix() -> None:
    recorder = Recorder()
    each = trainer(recorder, epochs=1, num_sanity_val_steps=0)
    each.fit(LogsEverywhere(), batches(1), batches(1, seed=2))
    each.test(LogsEverywhere(), batches(1), verbose=False)
    for stage in ("train", "val", "test"):
        assert recorder.having(f"{stage}/base_loss/value") == [4.0]


def test_the_settings_reach_log_dict() -> None:
    recorder = Recorder()
    module = Logs(on_step=False, on_epoch=True)
    trainer(recorder, epochs=1).fit(module, batches(1, 1, 2))
    # The mean of an epoch weighs batches by their size: (8 + 4 + 2 · 8) / 4
    assert recorder.having("train/loss_total") == pytest.approx([7.0])
