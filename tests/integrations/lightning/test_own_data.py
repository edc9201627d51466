"""A term with data of its own in a Lightning module of one's own: `join`, then `compose`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from steelyard import RegularizerSpec
from steelyard.integrations import CompositeLoss
from steelyard.integrations.lightning import RegularizedModule
from steelyard.regularizers import NLL
from tests.integrations.lightning.models import trainer

OTHERS = [(torch.randn(4, generator=torch.Generator().manual_seed(9)), n % 3) for n in range(5)]


def base(data: Any, logprobs: list[Tensor]) -> Tensor:
    assert len(data) == len(logprobs) == 2
    return -torch.cat(logprobs).mean()


class Model(RegularizedModule, LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        keep = RegularizerSpec(NLL(), 0.5, "keep", data=OTHERS, per_step=2)
        self.composite = CompositeLoss(base, [keep])
        self.drawn: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        joined = self.composite.join(list(zip(*batch, strict=True)))
        self.drawn.append(
            [next(i for i, o in enumerate(OTHERS) if o is d) for d in joined.own["keep"]]
        )
        features = torch.stack([x for x, _ in joined.data])
        rows = self.net(features).log_softmax(-1)
        labels = [int(label) for _, label in joined.data]
        logprobs = [row[label].reshape(1) for row, label in zip(rows, labels, strict=True)]
        return self.compose(data=joined, logprobs=logprobs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_each_step_draws_its_own_and_the_term_is_logged() -> None:
    torch.manual_seed(0)
    rows: Any = [(torch.randn(4), n % 3) for n in range(8)]
    model = Model()
    trainer(epochs=1).fit(model, DataLoader(rows, batch_size=2))
    assert len(model.drawn) == 4
    # A permutation: five draws in a row are different.
    flat = [index for drawn in model.drawn for index in drawn]
    assert len(set(flat[:5])) == 5
    keep = model.composite.output.regularizers["keep"]
    assert keep.value > 0
    assert keep.contribution == pytest.approx(0.5 * keep.value)
