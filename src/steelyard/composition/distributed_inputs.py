"""Inputs whose terms are compared over several processes: gradients of sharded parameters.

Each process has its own batch, and the gradient that trains is the mean over the processes, under
FSDP2 and under `DistributedDataParallel`. Norms and cosines are those of the terms' mean gradients,
equal on all processes: that of one process with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from steelyard.composition.aggregate import Products
from steelyard.composition.input_names import Reads
from steelyard.composition.inputs import Inputs, runs_in_graph, widened
from steelyard.composition.ranks import sum_over_ranks
from steelyard.composition.terms import Term, TermResult
from steelyard.errors import GradientError, InputError
from steelyard.gradients import (
    FullyShardedParameters,
    Row,
    differentiate,
    gram,
    is_fully_sharded,
    is_sharded,
    mapped,
    sharded_gram,
    tensors_in,
)
from steelyard.penalties.from_logits import Projection
from steelyard.spec import title


class DistributedInputs(Inputs):
    """Inputs in the caller's graph, with gradients that several processes compute together.

    Terms are differentiated after all of them have run, in the same order on all processes, also
    those that have failed or have no gradient here: a backward pass may be a collective operation.

    Args:
        named: the inputs of the terms, by name.
        space: name of the space of the gradient norms.
        targets: the tensors of that space.
        differentiate: the gradient of a loss with respect to the targets.
        gram: the Gram matrix of all terms' gradients, equal on all processes.
        fuse_base: whether the base loss may be fused with terms.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        space: str,
        targets: Sequence[Tensor],
        differentiate: Callable[[Tensor], Row],
        gram: Callable[[Sequence[Row]], list[list[float]]],
        *,
        fuse_base: bool = True,
    ) -> None:
        super().__init__(named, space, targets, fuse_base=fuse_base)
        self._differentiate, self._gram = differentiate, gram

    def differentiate(self, result: TermResult) -> None:
        """Keep the graph: `compare` differentiates."""
        assert result.value is not None  # noqa: S101 - for mypy: the caller has set it
        result.value = widened(result.term.spec, result.value)
        result.method = "autograd" if result.value.requires_grad else None

    def compare(self, results: Sequence[TermResult]) -> Products:
        """Inner products of the gradients of all terms; a collective operation.

        Every term that has a gradient on some process gets an entry in `gradients`, which has no
        tensors: they are not needed any more.
        """
        base, rows = results[0].value, list[Row]()
        # Through the whole model in any case: a term that ran on some processes only, or returned
        # a constant there, has to start the same collective operations as on the others.
        path = None if base is None or not base.requires_grad else 0.0 * base
        for result in results:
            began, own = perf_counter(), result.value if result.skipped is None else None
            parts = [x for x in (path, own) if x is not None and x.requires_grad]
            loss = sum(parts[1:], parts[0]) if parts else None
            rows.append([None] * len(self._targets) if loss is None else self._differentiate(loss))
            if result.method is not None:
                result.gradient_duration = perf_counter() - began
        products = self._gram(rows)
        for i, result in enumerate(results):
            if result.method is not None or products[i][i] > 0:
                result.gradients = {self.main_space: []}
        names = [result.term.name for result in results]
        return {
            (a, b): product
            for a, row in zip(names, products, strict=True)
            for b, product in zip(names, row, strict=True)
        }


def distributed_inputs(
    named: Mapping[str, Any],
    space: str,
    wrt: nn.Module | None,
    targets: Sequence[Tensor],
    *,
    fuse_base: bool,
) -> DistributedInputs | None:
    """Inputs for gradients that several processes compute together; None if each has its own.

    Args:
        named: the inputs of the terms, by name.
        space: name of the space of the gradient norms.
        wrt: the module that norms are with respect to; None if they are with respect to tensors.
        targets: the tensors that require a gradient, of `wrt` or of the inputs.
        fuse_base: whether the base loss may be fused with terms.

    Raises:
        GradientError: the gradients cannot be compared.
    """
    by_tensors = partial(differentiate, inputs=targets)
    if isinstance(wrt, DistributedDataParallel):
        compare = partial(_gram_of_means, like=targets, group=wrt.process_group)
        return DistributedInputs(named, space, targets, by_tensors, compare, fuse_base=fuse_base)
    if wrt is not None and is_fully_sharded(wrt):
        managed = FullyShardedParameters(wrt)
        compare = partial(sharded_gram, like=managed.parameters)
        return DistributedInputs(
            named, space, managed.parameters, managed.differentiate, compare, fuse_base=fuse_base
        )
    if not any(is_sharded(target) for target in targets):
        return None
    if wrt is None and any(is_sharded(target) and target.is_leaf for target in targets):
        # Under FSDP they are no leaves of the graph, and a gradient would be silently missing.
        raise GradientError(
            "norms with respect to sharded parameters need the module that holds them, got the "
            "parameters themselves: pass wrt=model."
        )
    compare = partial(sharded_gram, like=targets)
    return DistributedInputs(named, space, targets, by_tensors, compare, fuse_base=fuse_base)


def with_parts(
    named: Mapping[str, Any],
    terms: Sequence[Term],
    share: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Mapping[str, Any]:
    """Inputs whose sharded parameters get gradients that are sharded as they are.

    torch computes on whole tensors where a tensor has fewer elements than there are processes, and
    leaves a whole gradient to the parameter; FSDP would add its part of the gradient to that.

    Args:
        named: the inputs of the terms, by name.
        terms: the terms that are due.
        share: factor on the terms of this process.
        group: the processes; None: all of them.

    Raises:
        InputError: an offloaded term reads a sharded tensor, or the share is 0.
    """

    def as_it_is(tensor: Any) -> Any:
        if not _is_shard(tensor):
            return tensor
        return tensor.redistribute(tensor.device_mesh, tensor.placements)

    def scaled(tensor: Any) -> Any:
        part = as_it_is(tensor)
        if part is not tensor:
            part.register_hook(lambda gradient: scale * gradient)
        return part

    if not any(is_sharded(tensor) for tensor in tensors_in(named)):
        return named
    for term in terms:
        if not runs_in_graph(term.spec) and any(map(is_sharded, tensors_in(_read_by(term, named)))):
            # In a thread of its own its collective operations would meet those of other terms.
            raise InputError(
                f"{title(term.name)} reads a sharded tensor and must run inline, without a timeout "
                f"and with gradient='auto', got run_in={term.spec.run_in!r}: run it inline, or "
                f"pass it the whole tensor, x.full_tensor()."
            )
    # A projection has rows of its own: the gradient of its layer is averaged over the processes.
    own_rows: Mapping[str, Any] = mapped(named, lambda each: mapped(each, as_it_is), Projection)
    if not any(map(_is_shard, tensors_in(own_rows))):
        return own_rows
    scale = 1.0
    if isinstance(share, Tensor) or share != 1:
        scale = _scale_of_shards(share, group)
    inputs: Mapping[str, Any] = mapped(own_rows, as_it_is if scale == 1 else scaled)
    return inputs


def _read_by(term: Term, named: Mapping[str, Any]) -> Any:
    if isinstance(term.spec.fn, Reads):
        return term.spec.fn.arguments(named)
    return [named[name] for name in ("data", "logprobs", *term.spec.needs)]


def _scale_of_shards(share: float | Tensor, group: dist.ProcessGroup | None) -> float:
    """Factor on the gradients of sharded parameters that terms read: mean share / own share.

    A process has the gradients of its own shards alone, nobody averages them: a term over them has
    to count with the mean share of the processes, not with the share of one.
    """
    own = float(share)
    ((total,),) = sum_over_ranks([[own]], group)
    if own == 0:
        raise InputError(
            "a term that reads sharded parameters needs a share above 0 in every process, got 0: "
            "its micro-batch has no token that counts; drop such batches, or use weight decay."
        )
    return total / dist.get_world_size(group) / own


def _is_shard(tensor: Tensor) -> bool:
    return is_sharded(tensor) and tensor.is_leaf and tensor.requires_grad


def _gram_of_means(
    rows: Sequence[Row], like: Sequence[Tensor], group: dist.ProcessGroup
) -> list[list[float]]:
    """Gram matrix of the rows' means over the processes of a group, with one reduction."""
    sizes = [x.numel() for x in like]
    dtype = reduce(torch.promote_types, (x.dtype for x in like), torch.float32)
    means = torch.zeros(len(rows), sum(sizes), dtype=dtype, device=like[0].device)
    for row, into in zip(rows, means, strict=True):
        for gradient, part in zip(row, into.split(sizes), strict=True):
            if gradient is not None:
                part.copy_(gradient.to_dense().reshape(-1))
    dist.all_reduce(means, group=group)
    means /= dist.get_world_size(group)
    return gram([[row] for row in means], in_float64=True)
