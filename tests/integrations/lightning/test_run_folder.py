"""Run folders of Lightning's trainer: by the callback, and by a module that composes."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from steelyard.composition.composite import CompositeLoss
from steelyard.doctor.facts import Facts
from steelyard.integrations import term
from steelyard.integrations.lightning import RegularizedModule, RegularizerCallback

from .models import Batch, Plain, Recorder, batches, cross_entropy, trainer

DATA = batches(4, 4, 4, 4)


def sharpness(logits: Tensor) -> Tensor:
    return logits.square().mean()


class Returns(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits, _ = self.net(batch[0])
        return {"loss": cross_entropy(logits, batch[1]), "logits": logits}


class Composes(RegularizedModule, Plain):
    def __init__(self, run: Path) -> None:
        super().__init__()
        self.composite = CompositeLoss(
            cross_entropy, [term(sharpness, 0.1, "sharp")], aux={"router": 0.1}, run=run
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits, _ = self.net(batch[0])
        return self.compose(logits=logits, labels=batch[1])

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The lines as readers count them: the last one of each step."""
    text = (folder / "metrics.jsonl").read_text()
    return list({line["step"]: line for line in map(json.loads, text.splitlines())}.values())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_callback_writes_a_line_for_each_step(tmp_path: Path, accumulate: int) -> None:
    callback = RegularizerCallback(
        [term(sharpness, 0.1, "sharp")], aux={"router": 0.1}, run=tmp_path
    )
    recorder = Recorder()
    trainer(
        recorder,
        epochs=1,
        callbacks=[callback],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    ).fit(Returns(), DATA)
    written = lines(tmp_path)
    assert [line["step"] for line in written] == list(range(4 // accumulate))
    if accumulate == 1:
        logged = recorder.having("train/regularizers/sharp/value")
        assert [line["regularizers/sharp/value"] for line in written] == pytest.approx(logged)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["trainer"] == "Returns"
    assert config["train"]["steps"] == 4 // accumulate
    facts = Facts.of_config(config)
    assert (facts.learning_rate, facts.grad_clip_norm) == (0.2, 0.5)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's own, about both
def test_a_module_may_have_no_optimizer_and_a_loader_no_length(tmp_path: Path) -> None:
    class WithoutOptimizer(Composes):
        def configure_optimizers(self) -> Any:
            return None

    class Unsized:
        def __iter__(self) -> Iterator[Batch]:
            return iter(DATA)

    module = WithoutOptimizer(tmp_path)
    trainer(epochs=1).fit(module, Unsized())
    declared = module.composite.run_config["train"]
    assert (declared["learning_rate"], declared["steps"]) == (None, None)


def test_the_validation_of_a_module_that_composes_is_held_out(tmp_path: Path) -> None:
    module, recorder = Composes(tmp_path), Recorder()
    trainer(recorder, epochs=2, num_sanity_val_steps=2).fit(module, DATA, DATA)
    losses = recorder.having("val/base_loss/value")
    del module
    gc.collect()
    written = lines(tmp_path)
    assert [line["step"] for line in written] == list(range(8))
    held_out = {line["step"]: line["held_out/loss"] for line in written if "held_out/loss" in line}
    assert list(held_out) == [3, 7], "the sanity check is none"
    assert list(held_out.values()) == pytest.approx(losses[-2:])
