"""What each of two processes does in the tests of distributed training; they import this file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.errors import InputError

from .models import Net, activity, batch, confidence, cross_entropy, gradients

RANKS = 2


def rows_of(rank: int) -> tuple[Tensor, Tensor]:
    x, labels = batch(rows=8)
    return x[rank::RANKS], labels[rank::RANKS]


def composite(rank: int = 0, **settings: Any) -> CompositeLoss:
    def sometimes(logits: Tensor) -> Tensor:
        if rank == 1:
            raise ValueError("not on this one")
        return logits.square().mean()

    def seldom(logits: Tensor) -> Tensor | None:
        return logits.abs().mean() if rank == 0 else None

    terms = [
        term(seldom, 0.75, "seldom"),
        term(activity, 0.5, "activity"),
        term(sometimes, 0.25, "sometimes", on_error="skip"),
        term(confidence, 1.0, "never", enabled=False),
    ]
    return CompositeLoss(cross_entropy, terms, aux={"balance": 0.1}, **settings)


def train(rank: int) -> dict[str, Any]:
    model = Net()
    wrapped = DistributedDataParallel(model)
    loss = composite(rank, track_grad_norms=True, wrt=model, track_every=2)
    loss.watch(wrapped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.follow(optimizer)
    x, labels = rows_of(rank)
    found: dict[str, Any] = {"gradients": [], "outputs": [], "across": []}
    for _ in range(2):
        optimizer.zero_grad()
        loss(wrapped(x), labels=labels).backward()
        found["gradients"].append(gradients(model))
        found["outputs"].append(loss.output.to_dict())
        found["across"].append(loss.output_across_ranks().to_dict())
        optimizer.step()
    found["parameters"] = [p.detach() for p in model.parameters()]
    found["different"] = different_terms(rank)
    return found


def different_terms(rank: int) -> str:
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda x: x.sum(), 1.0, f"of rank {rank}")])
    loss(x=torch.ones(2))
    try:
        loss.output_across_ranks()
    except InputError as error:
        return str(error)
    return "no error"


def record(rank: int, folder: str | None) -> list[Tensor]:
    """Gradients of steps that are recorded in a run folder, unless it is None."""
    model = Net()
    loss = composite(rank, run=folder)
    loss.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = loss.follow(optimizer)
    x, labels = rows_of(rank)
    found: list[Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(x), labels=labels).backward()
        found += gradients(model)
        optimizer.step()
    handle.remove()
    return found
