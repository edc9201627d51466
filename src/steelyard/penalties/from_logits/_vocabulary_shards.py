"""Logits whose classes are spread over processes, as tensor parallelism leaves them.

A process has the columns of its classes, a `DTensor` with `Shard(-1)`. Two reductions give the
numbers of all classes: the logarithms of the sums of exponentials are gathered, which normalizes
the log-probabilities, and then the sums over the classes of all components are added up. Values are
the same on all processes, and each has the gradient of its own columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from array_api_compat import torch as xp
from torch import Tensor
from torch import distributed as dist

from steelyard.errors import GradientError, InputError
from steelyard.penalties._arrays import Array, gram_of_rows
from steelyard.penalties.divergences import LOG_ZERO
from steelyard.penalties.from_logits._components import NEED_REFERENCE, Component
from steelyard.penalties.from_logits._formulas import Block, gradients_of_block, masked_block
from steelyard.penalties.from_logits._logit_inputs import (
    ShardedRows,
    accept_rows,
    check_targets,
)


def accept_shards(
    logits: Any, reference: Any = None, targets: Any = None, mask: Any = None
) -> ShardedRows:
    """Check the inputs of a function over logits that are sharded over processes.

    Args:
        logits: A `DTensor`, sharded over its last axis along one dimension of its mesh, and
            replicated along the others.
        reference: Of the same shape: a `DTensor` that is sharded in the same way, or a whole one.
        targets: Whole, and the same on all processes.
        mask: As `targets`.

    Raises:
        InputError: The logits are sharded in another way, or a process has none of the classes;
            or as `accept_rows`.
    """
    mesh, axis = logits.device_mesh, logits.ndim - 1
    along = [i for i, p in enumerate(logits.placements) if not p.is_replicate()]
    if len(along) != 1 or not logits.placements[along[0]].is_shard(axis):
        raise InputError(
            f"logits that are spread over processes must be sharded over their classes alone, "
            f"Shard({axis}), got {tuple(logits.placements)}: pass logits.redistribute(...) to "
            f"that, or logits.to_local() if each process has rows of its own."
        )
    if reference is not None and tuple(reference.shape) != tuple(logits.shape):
        raise InputError(
            f"logits and reference must have the same shape, got {tuple(logits.shape)} and "
            f"{tuple(reference.shape)}; broadcast them first."
        )
    [dimension] = along
    count = logits.shape[-1]
    # As torch shards: equal pieces, of which the last may be smaller.
    processes = mesh.size(dimension)
    piece = math.ceil(count / processes)
    if piece * (processes - 1) >= count:
        raise InputError(
            f"logits that are sharded over their classes must leave each process at least one, got "
            f"{count} classes on {processes} processes: pass logits.full_tensor()."
        )
    offset = mesh.get_local_rank(dimension) * piece
    rows = accept_rows(
        _columns(logits, logits),
        None if reference is None else _columns(reference, logits),
        _whole(targets),
        _whole(mask),
    )
    if not rows.logits.is_cuda:  # pragma: no branch  # see `check_targets`
        check_targets(rows.targets, rows.mask, count)
    return ShardedRows(rows, mesh.get_group(dimension), offset, count)


def evaluate_shards(
    given: ShardedRows,
    components: Sequence[Component],
    weights: Sequence[float],
    reduction: str,
    tracks: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor | None]:
    """Weighted sum of components; as `evaluate`, which see."""
    rows = given.rows
    scale, share = rows.scale(reduction)
    factor = torch.ones_like(rows.logits[:, 0], dtype=rows.dtype) if scale is None else scale
    factor = share * factor
    total, values, products = _Rows.apply(  # type: ignore[no-untyped-call]
        rows.logits, rows.reference, given, components, weights, factor if tracks else None
    )
    if reduction == "none":
        return total.reshape(rows.shape), values, None, None
    return (total * factor).sum(), (values * factor).sum(-1), None, products if tracks else None


class _Rows(torch.autograd.Function):
    """Weighted sum by row; the forward pass computes the gradients by the process's columns."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        reference: Tensor | None,
        given: ShardedRows,
        components: Sequence[Component],
        weights: Sequence[float],
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = given.rows
        block = _ShardBlock(given, components)
        gradients = gradients_of_block(block, components, block.add_up)
        kept = 1.0 if rows.mask is None else rows.mask.to(rows.dtype)
        values = torch.stack([value * kept for value, *_ in gradients])
        total = sum(w * value for w, value in zip(weights, values, strict=True))
        by_logits = _weighted([gradient[1] for gradient in gradients], weights, kept, logits)
        by_reference = None
        if reference is not None and ctx.needs_input_grad[1]:
            by_reference = _weighted(
                [gradient[2] for gradient in gradients], weights, kept, reference
            )
        ctx.save_for_backward(by_logits, by_reference)
        products = logits.new_empty(0)
        if scale is not None:
            flat = [(gradient[1] * (kept * scale)[:, None]).reshape(-1) for gradient in gradients]
            products = gram_of_rows(xp, torch.stack(flat)).double()
            dist.all_reduce(products, group=given.group)
        ctx.mark_non_differentiable(values, products)
        return total, values, products

    @staticmethod
    def backward(ctx: Any, by_rows: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise GradientError(
                "a penalty from logits must be differentiated once, got create_graph=True; for "
                "second derivatives gather the logits, logits.full_tensor()."
            )
        gradients = [
            None if x is None else (x * by_rows[:, None]).to(x.dtype) for x in ctx.saved_tensors
        ]
        return *gradients, None, None, None, None


class _ShardBlock(Block):
    """A block with some of the classes, whose log-probabilities count all of them."""

    def __init__(self, given: ShardedRows, components: Sequence[Component]) -> None:
        rows = given.rows
        super().__init__(xp, *(masked_block(xp, x, slice(None), rows.mask) for x in rows[1:4]))
        self._shard = given
        keys = {(False, component.temperature) for component in components}
        keys |= {
            (True, component.temperature)
            for component in components
            if component.kind in NEED_REFERENCE
        }
        self._log_sums = self._gather(sorted(keys))

    def log_sum(self, component: Component) -> Array:
        level = self._log_sums[False, component.temperature]
        return torch.where(level <= LOG_ZERO / 2, -math.inf, level)

    def target_logprob(self, logs: Array) -> Array:
        """Entry of the target where this process has it, else 0; NaN if it is no class."""
        own = self.targets - self._shard.offset
        has = (own >= 0) & (own < logs.shape[-1])
        padded = torch.nn.functional.pad(logs, (0, 1))  # a column to read from, if it has none
        index = torch.where(has, own, logs.shape[-1]).long()
        logprob = padded.gather(-1, index[:, None])[:, 0]
        is_class = (self.targets >= 0) & (self.targets < self._shard.classes)
        return torch.where(is_class, logprob, math.nan)

    def is_target(self, like: Array) -> Array:
        classes = torch.arange(like.shape[-1], device=like.device) + self._shard.offset
        return classes[None, :] == self.targets[:, None]

    def add_up(self, sums: Sequence[Array]) -> Sequence[Array]:
        """Add up over the processes, all with one reduction."""
        if not sums:
            return sums
        totals = torch.stack(list(sums))
        dist.all_reduce(totals, group=self._shard.group)
        return list(totals)

    def _finite_log_probs(self, x: Array, of_reference: bool, temperature: float) -> Array:
        return self._scaled(x, temperature) - self._log_sums[of_reference, temperature][:, None]

    def _gather(self, keys: Sequence[tuple[bool, float]]) -> dict[tuple[bool, float], Tensor]:
        """`logsumexp(x / T)` over all classes, for each (is it the reference, T) of `keys`."""
        own = torch.stack(
            [
                self._scaled(self.reference if of_reference else self.logits, temperature)
                for of_reference, temperature in keys
            ]
        ).logsumexp(-1)
        group = self._shard.group
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own, group=group)
        return dict(zip(keys, torch.stack(every).logsumexp(0), strict=True))

    def _scaled(self, x: Array, temperature: float) -> Array:
        return torch.where(x == -math.inf, LOG_ZERO, x / temperature)


def _weighted(
    gradients: Sequence[Array], weights: Sequence[float], kept: Array, like: Tensor
) -> Tensor:
    pairs = zip(gradients, weights, strict=True)
    total = sum((w * g for g, w in pairs if g is not None), torch.zeros_like(like[:1]))
    rows = kept[:, None] if isinstance(kept, Tensor) else kept
    return (total * rows).expand(like.shape).to(like.dtype)


def _columns(x: Any, like: Any) -> Tensor:
    """This process's columns of logits that are sharded as `like`, or whole; differentiable."""
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 - loaded: it is one

    if not isinstance(x, DTensor):
        whole = [Replicate()] * like.device_mesh.ndim
        x = DTensor.from_local(x, like.device_mesh, whole, run_check=False)
    columns: Tensor = x.redistribute(placements=like.placements).to_local()
    return columns


def _whole(x: Any) -> Any:
    return x.full_tensor() if hasattr(x, "full_tensor") else x
