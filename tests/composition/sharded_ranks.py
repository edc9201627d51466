"""What each process of a group does in the tests of sharded training; it asserts by itself.

Every process also trains a plain copy of the model on the whole batch, which the sharded one, with
its part of the batch, has to equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from steelyard.composition import CompositeLoss, term
from steelyard.output import CustomLossOutput

from .models import activity, confidence, cross_entropy

CLOSE = 1e-6


class Block(nn.Module):
    """One layer with a residual connection, recomputed in the backward pass if `saves_memory`."""

    def __init__(self, width: int, saves_memory: bool) -> None:
        super().__init__()
        self.inner, self.saves_memory = nn.Linear(width, width), saves_memory

    def forward(self, x: Tensor) -> Tensor:
        if self.saves_memory:
            y: Tensor = checkpoint(self._layer, x, use_reentrant=False)
            return y
        return self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Stack(nn.Module):
    """Layers of a width that two or four processes cannot share evenly."""

    def __init__(self, saves_memory: bool = False, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width, saves_memory) for _ in range(2))
        self.last = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = early = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return {"logits": self.last(hidden), "hidden": hidden, "early": early}


def size_of(parameters: list[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """A term on parameters, whole or sharded."""
    total = sum((p.square().sum() for p in parameters), torch.zeros(()))
    return total, {"first": parameters[0].detach().square().sum()}


def _(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def composite(model: nn.Module, **settings: Any) -> CompositeLoss:
    terms = [
        term(activity, 0.5, "activity"),
        term(confidence, 0.25, "confidence"),
        term(lambda early: early.abs().mean(), 0.1, "early"),
        term(size_of, 1e-2, "size"),
    ]
    settings = {"track_grad_norms": True, "wrt": model} | settings
    return CompositeLoss(cross_entropy, terms, **settings)


def batches(accumulation: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = 8
    return [
        (
            torch.randn(rows, 4, generator=generator),
            torch.randint(0, 3, (rows,), generator=generator),
        )
        for _ in range(accumulation)
    ]


def shard(model: Stack, **settings: Any) -> Stack:
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def whole_gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(_(parameter.grad).float())
    return found


def assert_same(
    found: CustomLossOutput, expected: CustomLossOutput, close: float = CLOSE
) -> None:
    near = pytest.approx
    assert found.loss_total == near(expected.loss_total, rel=close)
    assert found.total_grad_norm == near(expected.total_grad_norm, rel=close)
    assert found.base_loss.grad_norm == near(expected.base_loss.grad_norm, rel=close)
    assert list(found.regularizers) == list(expected.regularizers)
    for name, each in expected.regularizers.items():
        mine = found.regularizers[name]
        assert mine.value == near(each.value, rel=close), name
        assert mine.grad_norm == near(each.grad_norm, rel=close), name
        assert mine.contribution == near(each.contribution, rel=close), name
    assert found.cosines == near(expected.cosines, rel=close, abs=close)


@contextmanager
def without_sync(model: nn.Module, kind: str, sync: bool) -> Iterator[None]:
    """Accumulate gradients in the process, without a reduction."""
    if sync:
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def check_training(rank: int, kind: str) -> None:
    """Losses, gradients, norms and values equal those of one process with the whole batch."""
    ranks = dist.get_world_size()
    for saves_memory, accumulation, every_sync in (
        (False, 1, True),
        (True, 1, True),
        (False, 4, True),
        (True, 4, False),
    ):
        alone, model = Stack(saves_memory), Stack(saves_memory)
        wrapped = DistributedDataParallel(model) if kind == "ddp" else shard(model)
        expected, found = composite(alone), composite(wrapped)
        # Before the forward pass: after it the outermost module has its whole parameters.
        parameters = list(model.parameters())
        for number, (x, labels) in enumerate(batches(accumulation)):
            own = expected(alone(x), labels=labels, parameters=list(alone.parameters()))
            (own / accumulation).backward()
            mine = slice(rank, None, ranks)
            last = number == accumulation - 1
            with without_sync(wrapped, kind, every_sync or last):
                total = found(wrapped(x[mine]), labels=labels[mine], parameters=parameters)
                (total / accumulation).backward()
            across = found.output_across_ranks()
            assert_same(across, expected.output)
            assert found.output.cosines == across.cosines
            assert across.regularizers["size"].custom == pytest.approx(
                expected.output.regularizers["size"].custom
            )
        torch.testing.assert_close(
            whole_gradients(model), whole_gradients(alone), rtol=CLOSE, atol=CLOSE
        )
