"""What each process of a group does in the tests of logits that are spread over processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.errors import GradientError, InputError
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits import (
    Projection,
    compose_logits,
    cross_entropy,
    entropy,
    js,
    kl,
    z_loss,
)
from tests.process_group import count_reductions

CALLS: dict[str, Any] = {
    "entropy": lambda z, r, t, m, how: entropy(z, mask=m, reduction=how, normalize=True),
    "warm entropy": lambda z, r, t, m, how: entropy(z, mask=m, reduction=how, temperature=2.0),
    "forward": lambda z, r, t, m, how: kl(z, r, mask=m, reduction=how),
    "reverse, limited": lambda z, r, t, m, how: kl(
        z, r, mask=m, reduction=how, direction="reverse", max_log_ratio=0.5
    ),
    "symmetric, exact": lambda z, r, t, m, how: kl(
        z, r, mask=m, reduction=how, direction="symmetric", max_log_ratio=None
    ),
    "js": lambda z, r, t, m, how: js(z, r, mask=m, reduction=how, temperature=0.7),
    "z_loss": lambda z, r, t, m, how: z_loss(z, mask=m, reduction=how),
    "cross_entropy": lambda z, r, t, m, how: cross_entropy(z, t, mask=m, reduction=how),
}
# An exact reverse KL is infinite where the reference alone has probability, its gradient NaN.
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6, "equal_nan": True}


def arrays(classes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    logits, reference = (
        3 * torch.randn(2, 3, classes, generator=generator, dtype=dtype) for _ in range(2)
    )
    logits[0, 0, 1] = -torch.inf  # a class without probability
    targets = torch.randint(0, classes, (2, 3), generator=generator)
    targets[0, 0] = 0
    return logits, reference, targets


def spread(x: Tensor, mesh: DeviceMesh) -> Any:  # a DTensor, whose methods are not typed
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(x.ndim - 1)]
    return distribute_tensor(x, mesh, placements).requires_grad_()


def gradient_placements(x: Any) -> Any:
    """Placements of the gradient of a plain sum over a process's columns.

    Torch's own: with 2.11 that of unevenly sharded columns is replicated, with 2.13 sharded.
    """
    leaf = x.detach().requires_grad_()
    leaf.to_local().sum().backward()
    return leaf.grad.placements


def check_terms(rank: int) -> None:
    """Values and gradients equal those of the whole logits."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    mask = torch.tensor([[True, True, False], [True, False, True]])
    few = spread(torch.zeros(2, ranks - 1 or 2), mesh)
    if ranks > 1:
        with pytest.raises(InputError, match=rf"at least one, got \d classes on {ranks} proc"):
            entropy(few)
    for classes in (12, 10):  # even, and uneven on four processes
        logits, reference, targets = arrays(classes)
        for name, call in CALLS.items():
            for how in ("mean", "sum", "none"):
                kept = None if how == "sum" else mask
                z, r = logits.clone().requires_grad_(), reference.clone().requires_grad_()
                expected = call(z, r, targets, kept, how)
                expected.sum().backward()
                own, other = spread(logits, mesh), spread(reference, mesh)
                found = call(own, other, targets, kept, how)
                assert not isinstance(found, DTensor)
                torch.testing.assert_close(found, expected, **CLOSE, msg=f"{name}, {how}")
                found.sum().backward()
                pairs = ((own, z), (other, r)) if r.grad is not None else ((own, z),)
                for mine, whole in pairs:
                    assert mine.grad is not None
                    assert mine.grad.placements == gradient_placements(mine)
                    pulled = mine.grad.full_tensor()
                    torch.testing.assert_close(pulled, whole.grad, **CLOSE)


def check_composed(rank: int) -> None:
    """Several terms at once, with norms and cosines; a whole reference; half precision."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits, reference, targets = arrays(10)
    terms = {"cross_entropy": 1.0, "kl": 0.1, "entropy": -0.2, "z_loss": 1e-2, "js": 0.5}
    z = logits.clone().requires_grad_()
    settings: dict[str, Any] = {"reference": reference, "targets": targets}
    expected = compose_logits(z, terms, **settings, track_grad_norms=True)
    expected.total.backward()
    own = spread(logits, mesh)
    with count_reductions() as reductions:
        found = compose_logits(own, terms, **settings)
    assert reductions == {"all_gather": 1, "all_reduce": 1}
    found = compose_logits(own, terms, **settings, track_grad_norms=True)
    found.total.backward()
    torch.testing.assert_close(found.total, expected.total, **CLOSE)
    torch.testing.assert_close(dict(found.values), dict(expected.values), **CLOSE)
    torch.testing.assert_close(dict(found.grad_norms), dict(expected.grad_norms), **CLOSE)
    torch.testing.assert_close(dict(found.cosines), dict(expected.cosines), **CLOSE)
    assert own.grad is not None
    torch.testing.assert_close(own.grad.full_tensor(), z.grad, **CLOSE)
    assert found.gradient is None
    half = spread(logits.bfloat16(), mesh)
    value = entropy(half)
    value.backward()
    torch.testing.assert_close(value, entropy(logits.bfloat16()))
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
    check_refusals(mesh, own, reference, targets, rank)


def check_refusals(
    mesh: DeviceMesh, own: Any, reference: Tensor, targets: Tensor, rank: int
) -> None:
    rows = distribute_tensor(own.detach().full_tensor(), mesh, [Shard(0)])
    with pytest.raises(
        InputError, match=re.escape("over their classes alone, Shard(2), got (Shar")
    ):
        entropy(rows)
    with pytest.raises(InputError, match="must have the same shape, got"):
        kl(own, reference[..., :4])
    with pytest.raises(InputError, match=r"targets must be in \[0, 9\].*got 10"):
        cross_entropy(own, torch.full_like(targets, 10))
    with pytest.raises(GradientError, match=r"once, got create_graph=True.*full_tensor"):
        torch.autograd.grad(entropy(own), own, create_graph=True)


def check_composite(rank: int) -> None:
    """A composite over the logits of an output layer in tensor parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    losses, models = list[CompositeLoss](), list[Any]()
    hidden = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(6)
    for sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 10)
        if sharded:
            plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(model, mesh, plan)
        terms = [
            term(from_logits.entropy, 0.1, "entropy", inputs="logits"),
            term(lambda logits: logits.square().mean(), 0.1, "size"),
        ]
        for wrt in (model, None):
            loss = CompositeLoss(from_logits.cross_entropy, terms, track_grad_norms=True, wrt=wrt)
            loss(logits=model(hidden), targets=targets).backward()
            losses.append(loss)
        models.append(model)
    for one, other in zip(losses[:2], losses[2:], strict=True):
        mine, whole = other.output, one.output
        assert mine.loss_total == pytest.approx(whole.loss_total, rel=1e-6)
        assert mine.total_grad_norm == pytest.approx(whole.total_grad_norm, rel=1e-6)
        assert mine.cosines == pytest.approx(whole.cosines, rel=1e-5)
        for name, each in whole.regularizers.items():
            assert mine.regularizers[name].grad_norm == pytest.approx(each.grad_norm, rel=1e-6)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(other.grad.full_tensor(), one.grad, **CLOSE)


def check_projection(rank: int) -> None:
    """A projection whose output layer is sharded, by FSDP or in tensor parallelism."""
    ranks = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(8, 5, generator=generator) for _ in range(2))
    targets = torch.arange(8)
    terms = {"cross_entropy": 1.0, "kl": 0.1}
    layers: list[Any] = []
    for _ in range(3):
        torch.manual_seed(0)
        layers.append(nn.Linear(5, 9))
    alone, sharded, parallel = layers
    own: Any = hidden.clone().requires_grad_()
    reference = Projection(teacher, torch.ones(9, 5), torch.zeros(9))
    expected = compose_logits(
        Projection(own, alone.weight, alone.bias), terms, targets=targets, reference=reference
    )
    expected.total.backward()

    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(sharded, mesh=mesh)
    at = slice(rank, None, ranks)
    mine = hidden[at].clone().requires_grad_()
    weight: Any = DTensor.from_local(torch.ones(9, 5), sharded.weight.device_mesh, [Replicate()])
    found = compose_logits(
        Projection(mine, sharded.weight, sharded.bias),
        terms,
        targets=targets[at],
        reference=Projection(teacher[at], weight.redistribute(placements=[Shard(0)])),
    )
    found.total.backward()
    total = found.total.detach()
    dist.all_reduce(total)
    torch.testing.assert_close(total / ranks, expected.total.detach(), **CLOSE)
    torch.testing.assert_close(mine.grad, ranks * own.grad[at], **CLOSE)

    parallelize_module(parallel, mesh, ColwiseParallel())
    rows: Any = DTensor.from_local(hidden, mesh, [Replicate()]).requires_grad_()
    found = compose_logits(
        Projection(rows, parallel.weight, parallel.bias),
        terms,
        targets=targets,
        reference=reference,
    )
    found.total.backward()
    torch.testing.assert_close(found.total.detach(), expected.total.detach(), **CLOSE)
    torch.testing.assert_close(rows.grad.full_tensor(), own.grad, **CLOSE)
    for layer in (sharded, parallel):
        for one, other in zip(alone.parameters(), layer.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, **CLOSE)
