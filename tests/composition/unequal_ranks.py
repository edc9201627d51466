"""Processes whose parts of a batch have unequal numbers of rows, some of them none.

Each compares itself with one process that has the whole batch: a backward pass of plain autograd
for each term, and TorchJD's own UPGrad on the rows of these gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from steelyard.composition.aggregate import Aggregator
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term

from .sharded_ranks import Stack, shard, size_of, whole_gradients

ROWS = 9
WEIGHTS = {"base": 1.0, "doubt": 0.7, "early": 0.5, "once": 0.3, "size": 1e-2}
CLOSE = 1e-6


def base(logits: Tensor, labels: Tensor, count: float) -> Tensor:
    """A sum, divided by the rows of the whole step as a trainer of Hugging Face divides it."""
    return functional.cross_entropy(logits, labels, reduction="sum") / count


def doubt(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over the rows of a process; it opposes the base loss."""
    rows = torch.arange(len(labels), device=labels.device)
    return logits[rows, labels].sum() / max(len(logits), 1)


def early(early: Tensor) -> Tensor:
    return -early.tanh().sum() / max(len(early), 1)


def once(hidden: Tensor) -> Tensor:
    """Not a mean over rows: one process evaluates it on all of them."""
    return hidden.mean(0).square().sum()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def rows_of(rank: int, counts: Sequence[int]) -> slice:
    """Rows of a process, given the number of rows of each."""
    begins = [0, *torch.tensor(counts).cumsum(0).tolist()]
    return [slice(*ends) for ends in pairwise(begins)][rank]


def composite(**settings: Any) -> CompositeLoss:
    terms = [
        term(doubt, WEIGHTS["doubt"], "doubt"),
        term(early, WEIGHTS["early"], "early"),
        term(once, WEIGHTS["once"], "once", ranks="one"),
        term(size_of, WEIGHTS["size"], "size"),
    ]
    return CompositeLoss(base, terms, track_grad_norms=True, **settings)


def rows_by_hand(model: nn.Module, count: float) -> dict[str, Tensor]:
    """The gradient of each term on the whole batch, as one vector."""
    x, labels = batch()
    out, parameters = model(x), list[Tensor](model.parameters())
    values = {
        "base": base(out["logits"], labels, count),
        "doubt": doubt(out["logits"], labels),
        "early": early(out["early"]),
        "once": once(out["hidden"]),
        "size": size_of(parameters)[0],
    }
    rows = {}
    for name, value in values.items():
        found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        filled = [
            torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)
        ]
        rows[name] = torch.cat([gradient.flatten() for gradient in filled])
    return rows


def check_shares(rank: int, kind: str, counts: Sequence[int], steps: int = 1) -> None:
    """Norms, cosines, factors and the gradient equal those of one process.

    Args:
        rank: of this process.
        kind: `"ddp"` or `"fsdp"`.
        counts: rows of each process; they add up to those of the batch.
        steps: the micro-batches of the step, of which this call is one.
    """
    ranks = dist.get_world_size()
    assert (len(counts), sum(counts)) == (ranks, ROWS)
    mine = rows_of(rank, counts)
    x, labels = batch()
    alone, model = Stack().double(), Stack().double()
    wrapped = DistributedDataParallel(model) if kind == "ddp" else shard(model)
    parameters = list(model.parameters())
    loss = composite(wrt=wrapped, aggregate="upgrad")
    loss.share = counts[rank] * ranks / (ROWS * steps)
    total = loss(
        wrapped(x[mine]), labels=labels[mine], count=ROWS * steps / ranks, parameters=parameters
    )
    total.backward()

    rows = rows_by_hand(alone, count=ROWS * steps)
    output = loss.output_across_ranks()
    norms = {"base": output.base_loss.grad_norm}
    norms |= {name: each.grad_norm for name, each in output.regularizers.items()}
    assert norms == pytest.approx({k: row.norm().item() for k, row in rows.items()}, rel=CLOSE)
    assert output.cosines == pytest.approx(
        {
            (a, b): functional.cosine_similarity(rows[a], rows[b], dim=0).item()
            for i, a in enumerate(rows)
            for b in list(rows)[i + 1 :]
        },
        rel=CLOSE,
        abs=CLOSE,
    )
    scales = {name: w if name == "base" else w / steps for name, w in WEIGHTS.items()}
    jacobian = torch.stack([scales[name] * row for name, row in rows.items()])
    preference = torch.ones(len(rows), dtype=torch.float64)
    # Imported here: the file is collected by `make test-gpu`, on machines without TorchJD.
    from torchjd.aggregation import UPGrad  # noqa: PLC0415

    expected = UPGrad(pref_vector=preference)(jacobian)
    found = torch.cat([g.flatten().double() for g in whole_gradients(model)])
    assert (found - expected).norm() <= CLOSE * expected.norm()
    factors = torch.tensor([output.factors[name] for name in rows], dtype=torch.float64)
    torch.testing.assert_close(factors @ jacobian, expected, rtol=CLOSE, atol=CLOSE)
    assert max(abs(factor - 1) for factor in output.factors.values()) > 0.1  # there is a conflict


class ByValue(Aggregator):
    """Factors that are the values of the terms."""

    def factors(
        self,
        values: Sequence[float],
        weights: Sequence[float],
        products: Sequence[Sequence[float]],
    ) -> Sequence[float]:
        return values


def factors_by_value(rank: int, counts: Sequence[int]) -> Mapping[str, float]:
    """The values of the terms that an aggregator sees in a process."""
    mine, ranks = rows_of(rank, counts), dist.get_world_size()
    x, labels = batch()
    model = DistributedDataParallel(Stack().double())
    loss = composite(wrt=model, aggregate=ByValue())
    loss.share = counts[rank] * ranks / ROWS
    parameters = list(model.parameters())
    loss(model(x[mine]), labels=labels[mine], count=ROWS / ranks, parameters=parameters)
    return loss.output.factors


def values_by_hand() -> dict[str, float]:
    """Those of one process."""
    (x, labels), model = batch(), Stack().double()
    out = model(x)
    return {
        "base": base(out["logits"], labels, ROWS).item(),
        "doubt": doubt(out["logits"], labels).item(),
        "early": early(out["early"]).item(),
        "once": once(out["hidden"]).item(),
        "size": size_of(list[Tensor](model.parameters()))[0].item(),
    }
