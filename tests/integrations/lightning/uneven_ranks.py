"""Train on two ranks with DDP, each with batches of its own, of other sizes.

One term fails on rank 1 at step 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from steelyard.integrations import CompositeLoss, term
from steelyard.integrations.lightning import RegularizedModule, RegularizerCallback
from tests.integrations.lightning.models import (
    Batch,
    Plain,
    Recorder,
    batches,
    cross_entropy,
    trainer,
)

DATA = [batches(4, 3, 5, seed=3), batches(2, 4, 3, seed=4)]
# Lightning 2.6 rounds the mean size of a rank's batches down: the sum of these is even.
HELD_OUT = [batches(3, 2, seed=5), batches(5, 2, seed=6)]


def activity(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


def unreliable(hidden: Tensor, rank: int, step: int) -> Tensor:
    if (rank, step) == (1, 1):
        raise ConnectionError("the judge is out")
    return hidden.abs().mean()


class Model(RegularizedModule, Plain):
    log_settings: ClassVar[Mapping[str, Any]] = {"on_step": True, "on_epoch": False}

    def __init__(self) -> None:
        super().__init__()
        self.composite = CompositeLoss(
            cross_entropy,
            [term(activity, 0.5, "activity"), term(unreliable, 0.3, "unreliable", on_error="skip")],
            aux={"router": 0.2},
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits, hidden = self.net(batch[0])
        return self.compose(
            logits=logits, hidden=hidden, labels=batch[1], rank=self.global_rank, step=batch_idx
        )


class Evaluated(Model):
    log_settings: ClassVar[Mapping[str, Any]] = {"on_step": False, "on_epoch": True}

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class Called(Plain):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        logits, hidden = self.net(batch[0])
        return {"loss": cross_entropy(logits, batch[1]), "hidden": hidden}


def numbers(model: Plain) -> list[float]:
    return torch.cat([each.detach().flatten() for each in model.net.parameters()]).tolist()


def train_unevenly(rank: int) -> dict[str, Any]:
    """Logged rows, and parameters at the end, of one of two processes."""
    settings: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    records: dict[str, Any] = {}

    model, recorder = Model(), Recorder()
    trainer(recorder, epochs=1, **settings).fit(model, DATA[rank])
    records["mixin"] = {"rows": recorder.rows, "parameters": numbers(model)}

    evaluated, recorder = Evaluated(), Recorder()
    trainer(recorder, **settings).test(evaluated, HELD_OUT[rank], verbose=False)
    records["test"] = {"rows": recorder.rows}

    for how, log in (("callback", {}), ("without sync", {"sync_dist": False})):
        called, recorder = Called(), Recorder()
        added = RegularizerCallback([term(activity, 0.5, "activity")], aux={"router": 0.2}, log=log)
        trainer(recorder, epochs=1, callbacks=[added], **settings).fit(called, DATA[rank])
        records[how] = {"rows": recorder.rows, "parameters": numbers(called)}
    return records
