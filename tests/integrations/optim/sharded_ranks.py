"""What each process of a group does in the tests of transforms of sharded parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from steelyard.errors import NonFiniteError
from steelyard.integrations import optim
from steelyard.integrations.optim import Transform

WIDTHS = {"even": 8, "uneven": 7}


def transforms() -> dict[str, Transform]:
    """All seven, each so strong that it changes every gradient."""
    return {
        "l2": optim.l2_decay(0.1),
        "l2, decoupled": optim.l2_decay(0.1, decoupled=True),
        "l1": optim.l1_decay(0.1, where=lambda p: p.ndim > 1),
        "elastic net": optim.elastic_net_decay(0.1, 0.3),
        "global norm": optim.clip_by_global_norm(0.05),
        "global norm, unchecked": optim.clip_by_global_norm(0.05, check_finite=False),
        "adaptive": optim.adaptive_clip(0.01),
        "noise": optim.gradient_noise(0.25, seed=3),
        "centralize": optim.centralize(),
    }


def network(width: int, seed: int = 0) -> Any:  # fully_shard changes its class, not typed
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def parallel(kind: str, model: Any) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    shape = None
    if kind == "hybrid":
        shape = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model[0], mesh=shape)
    return fully_shard(model, mesh=shape)


def whole(x: Tensor) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach()


def check_transforms(rank: int, kinds: list[str], widths: list[str]) -> None:
    """Gradients and parameters after two steps equal those of one process with the whole batch."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    for kind in kinds:
        mine = x if kind == "tensor" else x[rank :: dist.get_world_size()]
        for width in widths:
            for name, transform in transforms().items():
                alone, model = network(WIDTHS[width]), network(WIDTHS[width])
                wrapped = parallel(kind, model)
                for net, rows in ((alone, x), (wrapped, mine)):
                    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                    with optim.attach(optimizer, [transform]):
                        for _ in range(2):
                            optimizer.zero_grad()
                            net(rows).square().mean().backward()
                            optimizer.step()
                for one, other in zip(alone.parameters(), model.parameters(), strict=True):
                    assert one.grad is not None
                    assert other.grad is not None
                    close: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}
                    where = f"{name}, {kind}, {width}"
                    torch.testing.assert_close(whole(other.grad), one.grad, **close, msg=where)
                    torch.testing.assert_close(whole(other), one.detach(), **close, msg=where)


def check_not_finite(rank: int) -> None:
    """A gradient that is not finite on one process is an error on all of them."""
    model = network(8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).mean().backward()
    first = next(model.parameters())
    assert first.grad is not None
    if rank == 0:
        first.grad.to_local()[0, 0] = torch.inf
    named = "parameter 0 of group 0" if rank == 0 else "parts of other processes"
    message = rf"got inf at step 0 .*not finite: {named}"
    clip = optim.clip_by_global_norm(1.0)
    with optim.attach(optimizer, [clip]), pytest.raises(NonFiniteError, match=message):
        optimizer.step()
