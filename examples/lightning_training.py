"""Lightning in two ways: terms composed in a module, and terms added to an unchanged module.

A small network learns to classify points of two rings. One term makes its activations sparse, the
other makes its hidden units differ; the weight of the second grows from epoch to epoch.

    python examples/lightning_training.py
"""

# ruff: noqa: ARG002 - the methods and their arguments are Lightning's

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from steelyard import RegularizerSpec, penalties, schedules
from steelyard.integrations import CompositeLoss, reads, term
from steelyard.integrations.lightning import RegularizedModule, RegularizerCallback

EPOCHS = 4
STEPS_PER_EPOCH = 512 // 32


def rings(count: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    angle = 6.283 * torch.rand(count, generator=rng)
    radius = 1 + labels + 0.2 * torch.randn(count, generator=rng)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return DataLoader(TensorDataset(points, labels), batch_size=32)


def terms(hidden: str) -> list[RegularizerSpec]:
    """Terms of both ways; `hidden` is the name of the hidden activations there."""
    return [
        term(penalties.l1, 0.02, "sparsity", inputs=hidden, options={"reduction": "mean"}),
        term(
            lambda h: penalties.orthogonality(h.T),
            schedules.by_epoch(schedules.linear(0.0, 0.02, steps=EPOCHS - 1), STEPS_PER_EPOCH),
            "diversity",
            inputs=hidden,
        ),
    ]


class Plain(LightningModule):
    """A module without regularizers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(2, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        points, labels = batch
        return functional.cross_entropy(self.head(self.body(points)), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Composed(RegularizedModule, Plain):
    """The same module with a composite loss, in training and in validation."""

    log_settings: ClassVar[Mapping[str, Any]] = {"on_step": False, "on_epoch": True}

    def __init__(self) -> None:
        super().__init__()
        base = reads(functional.cross_entropy, "logits", "labels")
        self.composite = CompositeLoss(base, terms("hidden"))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        points, labels = batch
        hidden = self.body(points)
        return self.compose(logits=self.head(hidden), labels=labels, hidden=hidden)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class Table(Callback):
    """Print the logged metrics, one line per epoch."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        logged = trainer.callback_metrics
        row = [logged["train/base_loss/value"]]
        for name in ("sparsity", "diversity"):
            row += [logged[f"train/regularizers/{name}/{what}"] for what in ("value", "weight")]
        row += [logged[key] for key in ("train/loss_total", "val/loss_total") if key in logged]
        print(f"{trainer.current_epoch:5}", *(f"{float(value):9.4f}" for value in row))


def train(model: LightningModule, *callbacks: Callback, validate: bool) -> LightningModule:
    print("epoch      base  sparsity    weight diversity    weight     total  held out")
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, Table()],
    )
    trainer.fit(model, rings(512, seed=1), rings(128, seed=2) if validate else None)
    return model


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*LeafSpec|.*many workers")  # Lightning's own
    print("composed in the module")
    composed = train(Composed(), validate=True)
    print("\nadded by a callback")
    added = RegularizerCallback(
        terms("body"), capture="body", log={"on_step": False, "on_epoch": True}
    )
    plain = train(Plain(), added, validate=False)
    pairs = zip(composed.parameters(), plain.parameters(), strict=True)
    print("\nthe same model, to the last bit:", all(torch.equal(a, b) for a, b in pairs))


if __name__ == "__main__":
    main()
