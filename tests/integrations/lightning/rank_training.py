"""Train with Lightning in one of several processes, or alone; the processes import this."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from steelyard.integrations import CompositeLoss, term
from steelyard.integrations.lightning import RegularizedModule, RegularizerCallback
from tests.whole_batch import whole

from .models import Batches, Recorder, batches, cross_entropy
from .uneven_ranks import train_unevenly

ROWS = batches(*[8] * 16, seed=3)
STEPS = 4


class Average:
    """Mean activity, scaled by its moving average before this call; stateful."""

    def __init__(self) -> None:
        self.average = 0.0

    def compute(self, hidden: Tensor) -> Tensor:
        mean, before = hidden.abs().mean(), self.average
        self.average = 0.5 * before + 0.5 * mean.item()
        return (1 + before) * mean

    def state_dict(self) -> Mapping[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]


def size(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


def spread(hidden: Tensor) -> Tensor:
    """Not a mean over rows, so one process evaluates it."""
    return hidden.mean(0).square().sum().sqrt()


def terms() -> list[Any]:
    return [
        term(size, name="size", at_most=0.1),
        term(Average(), 0.3, "average", inputs="hidden"),
        term(spread, 0.2, "spread", ranks="one"),
    ]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first: nn.Module = nn.Linear(3, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return self.last(hidden), hidden


class Sharded(LightningModule):
    """Shards its model where the strategy is that of FSDP2."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        if isinstance(next(self.net.parameters()), DTensor):
            return
        if self.checkpointed:
            self.net.first = checkpoint_wrapper(self.net.first)
        fully_shard(self.net.first)
        fully_shard(self.net)


class Mixed(RegularizedModule, Sharded):
    log_settings: ClassVar[Mapping[str, Any]] = {"on_step": True, "on_epoch": False}

    def __init__(self) -> None:
        super().__init__()
        self.composite = CompositeLoss(cross_entropy, terms())

    def training_step(self, batch: Any, _batch_idx: int) -> Tensor:
        logits, hidden = self.net(batch[0])
        return self.compose(logits=logits, hidden=hidden, labels=batch[1])


class Tracked(Mixed):
    """Norms of the gradients of the network, which Lightning puts into a module of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.composite = CompositeLoss(
            cross_entropy, [term(size, 0.1, "size")], track_grad_norms=True, wrt=self.net
        )


class Called(Sharded):
    def training_step(self, batch: Any, _batch_idx: int) -> Any:
        logits, hidden = self.net(batch[0])
        return {"loss": cross_entropy(logits, batch[1]), "hidden": hidden}


class Gradients(Callback):
    """Records the gradients of each step, whole."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []

    def on_before_optimizer_step(self, _trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.steps.append([whole(p.grad) for p in module.parameters()])


def strategy(how: str) -> Any:
    if how == "fsdp":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return DDPStrategy() if how == "ddp" else "auto"


def rows_of(rank: int, ranks: int, epoch: int) -> Batches:
    return Batches([(x[rank::ranks], labels[rank::ranks]) for x, labels in list(ROWS)[:epoch]])


def train(
    how: str,
    accumulation: int = 1,
    *,
    called: bool = False,
    tracked: bool = False,
    checkpointed: bool = False,
    steps: int = STEPS,
    epoch: int = 16,
    save: Path | None = None,
    resume: Path | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train on the same rows, however many processes there are."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    module: Any = Called() if called else Tracked() if tracked else Mixed()
    module.checkpointed = checkpointed
    recorder, gradients = Recorder(), Gradients()
    added = [RegularizerCallback(terms())] if called else []
    if called and tracked:
        options: dict[str, Any] = {"track_grad_norms": True, "wrt": module.net}
        added = [RegularizerCallback([term(size, 0.1, "size")], **options)]
    composite = added[0].composite if called else module.composite
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy(how),
        devices=ranks,
        max_steps=steps,
        accumulate_grad_batches=accumulation,
        callbacks=[*added, gradients],
        logger=recorder,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **settings,
    )
    trainer.fit(module, rows_of(rank, ranks, epoch), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    output = composite.output_across_ranks() if ranks > 1 else composite.output
    return {
        "rows": [row for row in recorder.rows if "train/loss_total" in row],
        "gradients": gradients.steps,
        "parameters": [whole(p) for p in module.parameters()],
        "sharded": any(isinstance(p, DTensor) for p in module.parameters()),
        "output": output.to_dict(),
        "state": composite.get_extra_state(),
    }


WAYS = [
    (how, accumulation, called)
    for how in ("ddp", "fsdp")
    for accumulation in (1, 4)
    for called in (False, True)
]


TRACKED = [("ddp", False), ("ddp", True), ("fsdp", False)]


def everything(rank: int, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {
        (how, n, called): train(how, n, called=called) for how, n, called in WAYS
    }
    for how, called in TRACKED:
        found["tracked", how, called] = train(how, tracked=True, called=called)
    found["uneven"] = train_unevenly(rank)
    found["checkpointed"] = train("fsdp", checkpointed=True)
    found["bf16"] = train("fsdp", precision="bf16-mixed")
    for called in (False, True):
        # Lightning resumes with the first batch of an epoch, so one ends where the run is saved.
        epochs: dict[str, Any] = {"called": called, "epoch": 2, "steps": -1}
        path = folder / f"half-{called}.ckpt"
        found["straight", called] = train("fsdp", **epochs, max_epochs=2)
        train("fsdp", **epochs, max_epochs=1, save=path)
        found["resumed", called] = train("fsdp", **epochs, max_epochs=2, resume=path)
    return found
