"""Batches without a label that counts: terms over labels are left out, and training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from steelyard import RegularizerSpec
from steelyard.integrations import CompositeLoss, term
from steelyard.integrations.lightning import RegularizedModule, RegularizerCallback, steps
from steelyard.integrations.lightning.steps import unlabelled_terms
from tests.integrations.lightning.models import (
    Batch,
    Batches,
    Plain,
    Recorder,
    batches,
    by_hand,
    net,
    same,
    trainer,
)

(WHOLE, OTHER) = batches(4, 3)
DATA = Batches([WHOLE, (OTHER[0], torch.full_like(OTHER[1], -100))])


def clamped(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy per token that counts, 0 if none does."""
    total = functional.cross_entropy(logits, labels, reduction="sum")
    return total / (labels != -100).sum().clamp(min=1)


def sharpness(logits: Tensor, labels: Tensor) -> Tensor:
    kept = labels != -100
    return logits[kept].square().sum() / kept.sum()


def activity(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


TERMS = [term(sharpness, 0.2, "sharpness"), term(activity, 0.3, "activity")]


class Composed(RegularizedModule, Plain):
    def __init__(self) -> None:
        super().__init__()
        self.composite = CompositeLoss(clamped, TERMS, aux={"router": 0.2})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits, hidden = self.net(batch[0])
        return self.compose(logits=logits, hidden=hidden, labels=batch[1])


class Returning(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits, hidden = self.net(batch[0])
        return {"loss": clamped(logits, batch[1]), "logits": logits, "hidden": hidden}


def parts(inputs: Mapping[str, Any], step: int, epoch: int) -> dict[str, Tensor]:
    logits, labels = inputs["logits"], inputs["labels"]
    found = {"base": clamped(logits, labels), "router": 0.2 * inputs["router"]}
    found["activity"] = 0.3 * activity(inputs["hidden"])
    return found if step % 2 else {**found, "sharpness": 0.2 * sharpness(logits, labels)}


@pytest.mark.parametrize("kind", [Composed, Returning])
def test_training_goes_on(kind: type[Plain]) -> None:
    model, hand, recorder = kind(), net(), Recorder()
    callbacks: list[Any] = []
    if kind is Returning:
        callbacks = [RegularizerCallback(TERMS, aux={"router": 0.2}, batch=("x", "labels"))]
    trainer(recorder, callbacks=callbacks).fit(model, DATA)
    rows = by_hand(hand, DATA, parts)
    assert same(model.net, hand)
    contributions = recorder.having("train/regularizers/sharpness/contribution")
    expected = [row.get("sharpness", 0.0) for row in rows]
    assert contributions == pytest.approx(expected, rel=1e-6)
    assert contributions[1] == contributions[3] == 0


SPECS = [
    term(sharpness, 0.2, "sharpness"),
    term(lambda x: x.sum(), 0.2, "all", inputs="logits"),
    term(activity, 0.3, "activity"),
    RegularizerSpec(lambda data, logprobs: 0.0, 0.1, "data"),
    term(sharpness, 0.2, "once", ranks="one"),
]
NONE = torch.tensor([[-100, -100]])


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (NONE, {"sharpness", "all", "once"}),
        (torch.tensor([[-100, 3]]), set()),
        (torch.tensor([-100.0]), set()),  # numbers to predict
        (torch.tensor([], dtype=torch.long), set()),
        ([-100], set()),
    ],
)
def test_terms_that_are_left_out(labels: Any, expected: set[str]) -> None:
    assert unlabelled_terms(SPECS, {"labels": labels}, nn.Linear(1, 1)) == expected
    assert unlabelled_terms(SPECS[2:4], {"labels": labels}, nn.Linear(1, 1)) == set()


def test_terms_that_several_processes_compute_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    found = unlabelled_terms(SPECS, {"labels": NONE}, nn.Linear(1, 1))
    assert found == {"sharpness", "all"}
    monkeypatch.setattr(steps, "is_fully_sharded", lambda _: True)
    assert unlabelled_terms(SPECS, {"labels": NONE}, nn.Linear(1, 1)) == set()
