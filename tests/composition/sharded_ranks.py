"""What each process of a group does in the tests of sharded training; it asserts by itself.

Every process also trains a plain copy of the model on the whole batch, which the sharded one, with
its part of the batch, has to equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.errors import GradientError, InputError
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.regularizer import RegularizerSpec
from tests.process_group import count_reductions

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
        y: Tensor = x + self.inner(x).tanh()
        return y


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
    first, *others = (p.square().sum() for p in parameters)
    total = sum(others, first)
    return total, {"first": parameters[0].detach().square().sum()}


def whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def composite(model: nn.Module, **settings: Any) -> CompositeLoss:
    terms = [
        term(activity, 0.5, "activity"),
        term(confidence, 0.25, "confidence"),
        term(lambda early: early.abs().mean(), 0.1, "early"),
        term(size_of, 1e-2, "size"),
    ]
    every: dict[str, Any] = {"track_grad_norms": True, "wrt": model} | settings
    return CompositeLoss(cross_entropy, terms, **every)


def batches(accumulation: int, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = 8
    return [
        (
            torch.randn(rows, 4, generator=generator).to(device),
            torch.randint(0, 3, (rows,), generator=generator).to(device),
        )
        for _ in range(accumulation)
    ]


def shard(model: Stack, **settings: Any) -> Any:  # fully_shard changes its class, not typed
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def whole_gradients(model: nn.Module) -> list[Tensor]:
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(whole(parameter.grad).float())
    return found


def assert_same(found: CustomLossOutput, expected: CustomLossOutput, close: float = CLOSE) -> None:
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


def check_training(rank: int, kind: str, device: str = "cpu") -> None:
    """Losses, gradients, norms and values equal those of one process with the whole batch."""
    ranks = dist.get_world_size()
    for saves_memory, accumulation, every_sync in (
        (False, 1, True),
        (True, 1, True),
        (False, 2, True),
        (True, 2, False),
    ):
        alone, model = (Stack(saves_memory).to(device) for _ in range(2))
        wrapped = DistributedDataParallel(model) if kind == "ddp" else shard(model)
        expected, found = composite(alone), composite(wrapped)
        # Before the forward pass: after it the outermost module has its whole parameters.
        parameters = list(model.parameters())
        for number, (x, labels) in enumerate(batches(accumulation, device)):
            own = expected(alone(x), labels=labels, parameters=list(alone.parameters()))
            (own / accumulation).backward()
            mine = slice(rank, None, ranks)
            last = number == accumulation - 1
            with without_sync(wrapped, kind, every_sync or last):
                out = wrapped(x[mine])
                with count_reductions() as reductions:
                    total = found(out, labels=labels[mine], parameters=parameters)
                # One for all terms and one of shares, beside those of FSDP itself in a backward
                # pass; a term on sharded parameters needs the shares before it runs.
                several = dist.get_world_size() > 1
                assert reductions["all_reduce"] == 1 + several * (2 if kind == "fsdp" else 1)
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


def check_optimizer_steps(rank: int) -> None:
    """Several optimizer steps under FSDP with an aggregator end at the same parameters."""
    ranks = dist.get_world_size()
    alone, model = Stack(), shard(Stack())
    losses = [composite(m, aggregate="upgrad", track_every=2) for m in (alone, model)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (alone, model)]
    parameters = [list(m.parameters()) for m in (alone, model)]
    for loss, optimizer in zip(losses, optimizers, strict=True):
        loss.follow(optimizer)
    for x, labels in batches(3):
        mine = slice(rank, None, ranks)
        totals = [
            losses[0](alone(x), labels=labels, parameters=parameters[0]),
            losses[1](model(x[mine]), labels=labels[mine], parameters=parameters[1]),
        ]
        for total, optimizer in zip(totals, optimizers, strict=True):
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
        assert losses[1].output.factors == pytest.approx(losses[0].output.factors, rel=1e-4)
    for one, other in zip(*parameters, strict=True):
        torch.testing.assert_close(whole(other.detach()), one.detach(), rtol=1e-4, atol=1e-5)


def check_different_terms(rank: int, kind: str) -> None:
    """A term that ran on one process only has the norm of its mean gradient, on all of them."""
    ranks = dist.get_world_size()

    def sometimes(logits: Tensor) -> Tensor:
        if rank > 0:
            raise ValueError("not on this one")
        return logits.square().mean()

    def nearly_never(hidden: Tensor) -> Tensor:
        return hidden.square().mean() if rank == 0 else hidden.new_zeros(())

    alone, model = Stack(), Stack()
    wrapped = DistributedDataParallel(model) if kind == "ddp" else shard(model)
    terms = [
        term(sometimes, 1.0, "sometimes", on_error="skip"),
        term(nearly_never, 1.0, "nearly_never", gradient="auto"),
        term(lambda logits: logits.detach().mean(), 1.0, "never", gradient="none"),
    ]
    loss = CompositeLoss(cross_entropy, terms, track_grad_norms=True, wrt=wrapped)
    [(x, labels)] = batches(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(wrapped(x[rank::ranks]), labels=labels[rank::ranks]).backward()
    out = alone(x[::ranks])
    for name, value in (
        ("sometimes", out["logits"].square().mean()),
        ("nearly_never", out["hidden"].square().mean()),
    ):
        pulls = torch.autograd.grad(
            value / ranks, list(alone.parameters()), retain_graph=True, allow_unused=True
        )
        norm = torch.cat([each.flatten() for each in pulls if each is not None]).norm().item()
        across = loss.output_across_ranks().regularizers[name]
        assert across.grad_norm == pytest.approx(norm, rel=CLOSE)
    own = loss.output
    assert ("sometimes" in own.skipped) == (rank > 0)
    assert own.regularizers["nearly_never"].grad_norm == pytest.approx(norm, rel=CLOSE)
    assert own.regularizers["never"].grad_norm is None
    assert all("never" not in pair for pair in own.cosines)


def check_mixed_precision(rank: int) -> None:
    """Norms in bfloat16 are those of float32 up to its eight bits."""
    ranks = dist.get_world_size()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    alone, model = Stack(), shard(Stack(), mp_policy=policy)
    losses = [composite(m) for m in (alone, model)]
    parameters = [list(m.parameters()) for m in (alone, model)]
    for number, (x, labels) in enumerate(batches(2)):
        losses[0](alone(x), labels=labels, parameters=parameters[0]).backward()
        mine = slice(rank, None, ranks)
        # Gradients that wait for their reduction are in float32, apart from the parameter.
        model.set_requires_gradient_sync(number == 1)
        out = {key: value.float() for key, value in model(x[mine]).items()}
        losses[1](out, labels=labels[mine], parameters=parameters[1]).backward()
        assert_same(losses[1].output_across_ranks(), losses[0].output, close=0.05)
    torch.testing.assert_close(whole_gradients(model), whole_gradients(alone), rtol=0.05, atol=0.02)


def check_two_dimensions(rank: int) -> None:
    """Parameters that are sharded over two processes and replicated over two pairs of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    alone, model = Stack(), shard(Stack(), mesh=mesh)
    losses = [composite(m) for m in (alone, model)]
    parameters = [list(m.parameters()) for m in (alone, model)]
    [(x, labels)] = batches(1)
    losses[0](alone(x), labels=labels, parameters=parameters[0])
    losses[1](model(x[rank::4]), labels=labels[rank::4], parameters=parameters[1])
    assert_same(losses[1].output_across_ranks(), losses[0].output)


def check_tensor_parallel(rank: int) -> None:
    """Parameters that are sharded by column and by row, in tensor parallelism."""
    alone, model = Stack(width=8), Stack(width=8)
    blocks: list[Any] = list(model.blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model.first, mesh, ColwiseParallel(output_layouts=Replicate()))
    for block in blocks:
        parallelize_module(block.inner, mesh, ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model.last, mesh, RowwiseParallel(input_layouts=Replicate()))
    losses = [composite(m) for m in (alone, model)]
    [(x, labels)] = batches(1)
    for loss, m in zip(losses, (alone, model), strict=True):
        loss(m(x), labels=labels, parameters=list(m.parameters())).backward()
    assert_same(losses[1].output, losses[0].output)
    torch.testing.assert_close(
        whole_gradients(model), whole_gradients(alone), rtol=CLOSE, atol=CLOSE
    )


def check_refusals(rank: int) -> None:
    """Norms that would be no norms are refused by name."""
    model = Stack()
    fully_shard(model)
    [(x, labels)] = batches(1)
    parameters = list(model.parameters())
    for wrt, message in (
        (parameters, "the parameters themselves: pass wrt=model"),
        (model.blocks[0], "'inner.weight', which it does not manage: pass the module that"),
        (None, "the parameters themselves: pass wrt=model"),
    ):
        loss = composite(model, wrt=wrt)
        with pytest.raises(GradientError, match=message):
            loss(model(x), labels=labels, parameters=parameters)
    data = [torch.zeros(1)]
    for offloaded in (
        term(size_of, 1.0, "size", run_in="thread"),
        RegularizerSpec(
            lambda _, __, parameters: 0.0, 1.0, "size", needs=("parameters",), timeout=9
        ),
    ):
        loss = CompositeLoss(lambda x: x.sum(), [offloaded])
        with pytest.raises(InputError, match=r"regularizer 'size' reads a sharded tensor and must"):
            loss(x=x, data=data, logprobs=data, parameters=parameters)


def check_first_fsdp(rank: int) -> None:
    """FSDP1 is refused by name too."""
    [(x, labels)] = batches(1)
    old = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))
    loss = CompositeLoss(cross_entropy, track_grad_norms=True, wrt=old)
    with pytest.raises(GradientError, match="which it does not manage"):
        loss(logits=old(x), labels=labels)
