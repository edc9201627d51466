"""Cost of norms under FSDP2: two gloo processes, 1, 4 and 8 terms, tracked against untracked.

Beside it the same in one process without FSDP.

Run it as `python -m benchmarks.sharded`; it is not part of `make bench`, whose times a second
process would disturb.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from benchmarks.measure import CONSOLE, in_turn
from steelyard import CompositeLoss, term

RANKS, REPEATS = 2, 9
TERMS = (1, 4, 8)
LAYERS, WIDTH, CLASSES, ROWS, LENGTH = 4, 256, 2000, 4, 64


class Model(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the tokens."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden).clone()  # no view, which FSDP warns of
        return logits


def base(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def size(logits: Tensor) -> Tensor:
    return logits.square().mean()


def step(model: Any, optimizer: Any, loss: CompositeLoss, tokens: Tensor) -> None:
    optimizer.zero_grad()
    loss(logits=model(tokens), labels=tokens).backward()
    optimizer.step()


def measure_sharded(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    model: Any = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    measure(model, f"{RANKS} processes" if rank == 0 else None)
    dist.destroy_process_group()


def measure(model: Any, title: str | None) -> None:
    torch.set_num_threads(1)
    tokens = torch.randint(0, CLASSES, (ROWS, LENGTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for count in TERMS:
        terms = [term(size, 1e-3, f"size {i}") for i in range(count)]
        ways = {
            name: CompositeLoss(base, terms, track_grad_norms=tracked, wrt=model)
            for name, tracked in (("untracked", False), ("tracked", True))
        }
        found = in_turn(
            {name: partial(step, model, optimizer, loss, tokens) for name, loss in ways.items()},
            repeats=REPEATS,
            warmup=2,
        )
        if title is not None:
            timing = found["tracked"]
            CONSOLE.print(
                f"{title}, {count} terms: untracked {1e3 * found['untracked'].median:.0f} ms, "
                f"tracked {timing.ratio:.2f} × ({timing.spread[0]:.2f}-{timing.spread[1]:.2f})"
            )


def main() -> None:
    measure(Model(), "one process")
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        spawn(measure_sharded, (meeting,), nprocs=RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
