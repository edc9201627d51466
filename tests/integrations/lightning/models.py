"""A small model, its data, the real Trainer, and the same training in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional

from steelyard.integrations import aux_loss

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Two layers; reports the auxiliary loss `router`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        self.router = aux_loss("router", hidden.mean().square())
        return self.last(hidden), hidden


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


@dataclass
class Batches:
    """A data loader; Lightning takes any iterable."""

    batches: list[Batch]

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def batches(*sizes: int, seed: int = 1) -> Batches:
    rng = torch.Generator().manual_seed(seed)
    return Batches(
        [
            (torch.randn(size, 3, generator=rng), torch.randint(4, (size,), generator=rng))
            for size in sizes
        ]
    )


class Plain(LightningModule):
    """A LightningModule without steps; subclasses write them."""

    def __init__(self, model: Net | None = None) -> None:
        super().__init__()
        self.net = model or net()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class Recorder(Logger):
    """A logger that records the metrics."""

    name = "recorder"
    version = 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def having(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if key in row]


def trainer(recorder: Recorder | None = None, *, epochs: int = 2, **settings: Any) -> Trainer:
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=recorder or False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path("/nowhere"),  # writing there would fail
        **settings,
    )


# Components of the loss: `(inputs, step, epoch) -> {key: value}`.
Parts = Callable[[Mapping[str, Any], int, int], dict[str, Tensor]]


def by_hand(
    model: Net,
    data: Batches,
    parts: Parts,
    *,
    epochs: int = 2,
    accumulate: int = 1,
    clip: float = 0,
) -> list[dict[str, float]]:
    """Train in plain torch, and return the components of the loss at each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    rows = []
    step = 0
    for epoch in range(epochs):
        for i, (x, labels) in enumerate(data, 1):
            found = parts(read(model, x, labels), step, epoch)
            total = sum(found.values(), torch.tensor(0.0))
            (total / accumulate).backward()  # type: ignore[no-untyped-call]  # torch leaves it so
            rows.append({name: value.item() for name, value in found.items()})
            if i % accumulate == 0 or i == len(data):
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    return rows


def read(model: Net, x: Tensor, labels: Tensor) -> dict[str, Any]:
    """Inputs of the components of the loss."""
    logits, hidden = model(x)
    return {"logits": logits, "hidden": hidden, "labels": labels, "router": model.router}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def same(one: nn.Module, other: nn.Module) -> bool:
    """True if all parameters are equal bit for bit."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


class Drift:
    """Squared distance of the mean from its moving average, a tensor changed in place."""

    name = "drift"

    def __init__(self) -> None:
        self.average = torch.zeros(())

    def __call__(self, hidden: Tensor) -> Tensor:
        now = hidden.mean()
        distance = (now - self.average.clone()).square()
        self.average.mul_(0.5).add_(0.5 * now.detach())
        return distance

    def state_dict(self) -> dict[str, Tensor]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.average = state["average"].clone()
