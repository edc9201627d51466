"""Sharded training: FSDP2, a bound, a judge that is asked once for all processes, a checkpoint.

Every process has its own rows of a batch and its own shard of the model. The loss equals that of
one process on all rows: the multiplier of the bound follows the mean value of all processes, and
the judge, which looks at the whole batch, gets one call a step. Half-way the run is saved as a
sharded checkpoint, and goes on from it. Run it with
`torchrun --nproc-per-node 2 examples/sharded.py`; with `python` it is one process, which prints
the same numbers. It needs only `steelyard[torch]`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import Optimizer

from steelyard import CustomLossOutput
from steelyard.integrations import CompositeLoss, reads, term

Run: TypeAlias = tuple[nn.Module, Optimizer, CompositeLoss]
STEPS, EVERY, ROWS, WIDTH, CLASSES = 40, 10, 64, 16, 4


def activity(hidden: Tensor) -> Tensor:
    """Mean square of the hidden activations: a mean over rows, evaluated by every process."""
    return hidden.square().mean()


def imbalance(logits: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Variance of the classes' frequencies in the whole batch: not a mean over rows.

    It stands for a judge that is slow, or is paid by the call.
    """
    return CLASSES * logits.softmax(-1).mean(0).var(), {"rows": float(len(logits))}


class Classifier(nn.Module):
    """Two layers; terms read its outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x).tanh()
        return {"hidden": hidden, "logits": self.head(hidden)}


def build() -> Run:
    torch.manual_seed(0)  # the same weights in every process
    model = Classifier()
    fully_shard(model.body)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = CompositeLoss(
        reads(functional.cross_entropy, "logits", "labels"),
        [
            term(activity, name="activity", at_most=0.1),
            term(imbalance, 0.5, "imbalance", ranks="one", timeout=10.0),
        ],
    )
    loss.follow(optimizer)
    return model, optimizer, loss


def rows_of(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    x = functional.one_hot(labels, WIDTH) + 0.3 * torch.randn(ROWS, WIDTH, generator=generator)
    return x[rank::ranks], labels[rank::ranks]


def train(model: nn.Module, optimizer: Optimizer, loss: CompositeLoss, steps: range) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        x, labels = rows_of(step, rank, ranks)
        total = loss(model(x), labels=labels)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        output = loss.output_across_ranks()
        if rank == 0 and step % EVERY == EVERY - 1:
            print(row(step + 1, output))


def save_and_load(folder: Path, model: nn.Module, optimizer: Optimizer, loss: CompositeLoss) -> Run:
    """Save a run as shards, one for each process, and load them into a new run."""
    saved = get_state_dict(model, optimizer)
    save(dict(zip(PARTS, (*saved, loss), strict=True)), checkpoint_id=folder)
    model, optimizer, loss = build()
    states = get_state_dict(model, optimizer)
    load(dict(zip(PARTS, (*states, loss), strict=True)), checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    return model, optimizer, loss


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    if dist.get_rank() == 0:
        print(HEADINGS)
    run = build()
    train(*run, range(STEPS // 2))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)  # the processes write into one folder
    run = save_and_load(Path(folder[0]) / "checkpoint", *run)
    train(*run, range(STEPS // 2, STEPS))
    # gloo's threads free the tensors of the last reductions: let them, before Python ends.
    dist.barrier()
    dist.destroy_process_group()


PARTS = ("model", "optimizer", "loss")
HEADINGS = "step   total    base | activity multiplier | imbalance, judged rows"


def row(step: int, output: CustomLossOutput) -> str:
    activity, imbalance = output.regularizers.values()
    return (
        f"{step:4d} {output.loss_total:7.3f} {output.base_loss.value:7.3f} | "
        f"{activity.value:8.3f} {activity.weight:10.3f} | "
        f"{imbalance.value:9.4f} {imbalance.custom['rows']:12.0f}"
    )


if __name__ == "__main__":
    main()
