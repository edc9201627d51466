"""Inputs whose terms are compared over several processes: gradients of sharded parameters.

Each process r has its own batch, and the gradient that trains is the mean over the R processes,
under FSDP2 and under `DistributedDataParallel`. A process adds sᵣ · wᵢ · vᵢᵣ to its loss, with its
share sᵣ, so that the gradient of term i on the whole batch is

    gᵢ = Σᵣ sᵣ gᵢᵣ / Σᵣ sᵣ          (of the base loss, which is scaled already, Σᵣ gᵢᵣ / R)

and trains with the weight S · wᵢ, where S = Σᵣ sᵣ / R. Norms, cosines and the rows that an
aggregator sees are those of gᵢ, equal on all processes: those of one process with the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from steelyard._torch_internals import is_fully_sharded
from steelyard.composition.aggregate import ComparedGradients, read_numbers
from steelyard.composition.input_names import Reads
from steelyard.composition.inputs import Inputs, requiring_grad, runs_in_graph, widened
from steelyard.composition.ranks import Ranks, sum_over_ranks
from steelyard.composition.terms import Term, TermResult
from steelyard.errors import GradientError, InputError
from steelyard.gradients.algebra import Row, differentiate, gram
from steelyard.gradients.layout import mapped, tensors_in
from steelyard.gradients.sharded import (
    FullyShardedParameters,
    is_sharded,
    sharded_gram,
)
from steelyard.penalties.from_logits.projection import Projection
from steelyard.spec.error_messages import title


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
        share: factor on the terms of this process.
        ranks: the processes whose gradients are averaged; None if this one has the whole batch.
        kept: names of the terms whose gradient counts whatever the share; see `with_parts`.
        fuse_base: whether the base loss may be fused with terms.
    """

    def __init__(
        self,
        named: Mapping[str, Any],
        space: str,
        targets: Sequence[Tensor],
        differentiate: Callable[[Tensor], Row],
        gram: Callable[[Sequence[Row]], list[list[float]]],
        share: float = 1.0,
        ranks: Ranks | None = None,
        kept: Collection[str] = (),
        *,
        fuse_base: bool = True,
    ) -> None:
        super().__init__(named, space, targets, fuse_base=fuse_base)
        self._differentiate, self._gram = differentiate, gram
        self._share, self._ranks, self._kept = share, ranks, kept

    def differentiate(self, result: TermResult) -> None:
        """Keep the graph: `compare` differentiates."""
        assert result.value is not None  # noqa: S101 - for mypy: the caller has set it
        result.value = widened(result.term.spec, result.value)
        result.method = "autograd" if result.value.requires_grad else None

    def compare(self, results: Sequence[TermResult], *, reads_values: bool) -> ComparedGradients:
        """Compare the gradients of all terms; a collective operation.

        Every term that has a gradient on some process gets an entry in `gradients`, which has no
        tensors: they are not needed any more.

        Args:
            results: of all terms, the base loss first.
            reads_values: whether the aggregator sees values.
        """
        base, rows = results[0].value, list[Row]()
        # Through the whole model in any case: a term that ran on some processes only, or returned
        # a constant there, has to start the same collective operations as on the others.
        path = None if base is None or not base.requires_grad else 0.0 * base
        for result in results:
            began, own = perf_counter(), self._counted(result)
            parts = [x for x in (path, own) if x is not None and x.requires_grad]
            loss = sum(parts[1:], parts[0]) if parts else None
            rows.append([None] * len(self._targets) if loss is None else self._differentiate(loss))
            if result.method is not None:
                result.gradient_duration = perf_counter() - began
        products = self._gram(rows)
        has_gradient = [result.method is not None for result in results]
        share, values = self._share, None
        if self._ranks is not None:
            share, values, has_gradient = _agree(results, has_gradient, self._ranks, reads_values)
        for i, result in enumerate(results):
            if has_gradient[i] or products[i][i] > 0:
                result.gradients = {self.main_space: []}
        # The mean gradients of the terms have the shares in them, their weighted mean has not.
        mean = share if self._ranks is not None and share else 1.0
        scales = {r.term.name: 1.0 if r.term.is_base else 1 / mean for r in results}
        of_pairs = {
            (a, b): scales[a] * scales[b] * product
            for a, row in zip(scales, products, strict=True)
            for b, product in zip(scales, row, strict=True)
        }
        return ComparedGradients(of_pairs, share, values)

    def _counted(self, result: TermResult) -> Tensor | None:
        """The value of a term as it counts in the mean over the processes; None if it has none."""
        if result.skipped is not None or result.value is None:
            return None
        whole = self._ranks is None or result.term.is_base or result.term.name in self._kept
        return result.value if whole else self._share * result.value


def _agree(
    results: Sequence[TermResult], has_gradient: Sequence[bool], ranks: Ranks, reads_values: bool
) -> tuple[float, dict[str, float] | None, list[bool]]:
    """Mean share, values on the whole batch, and which terms have a gradient on some process.

    All processes have to see the same rows and values, to find the same factors.
    """
    ran = [r for r in results if r.skipped is None and r.value is not None]
    numbers = read_numbers(ran) if reads_values else [0.0] * len(ran)
    own = dict(zip([result.term.name for result in ran], numbers, strict=True))
    table = [[ranks.share, 1.0, 0.0]]
    for result, has in zip(results, has_gradient, strict=True):
        name, factor = result.term.name, 1.0 if result.term.is_base else ranks.share
        factor = factor if name in own else 0.0
        table.append([factor * own.get(name, 0.0), factor, float(has)])
    (total, count, _), *rows = sum_over_ranks(table, ranks.group)
    means = [value / factor if factor else 0.0 for value, factor, _ in rows]
    values = dict(zip([result.term.name for result in results], means, strict=True))
    return total / count, values if reads_values else None, [number > 0 for *_, number in rows]


def distributed_inputs(
    named: Mapping[str, Any],
    space: str,
    wrt: nn.Module | None,
    targets: Sequence[Tensor],
    share: float | Tensor,
    group: dist.ProcessGroup | None,
    kept: Collection[str],
    *,
    fuse_base: bool,
) -> DistributedInputs | None:
    """Inputs for gradients that several processes compute together; None if each has its own.

    Args:
        named: the inputs of the terms, by name.
        space: name of the space of the gradient norms.
        wrt: the module that norms are with respect to; None if they are with respect to tensors.
        targets: the tensors that require a gradient, of `wrt` or of the inputs.
        share: factor on the terms of this process.
        group: the processes of data parallelism under FSDP; None: all of them.
        kept: names of the terms whose gradient counts whatever the share; see `with_parts`.
        fuse_base: whether the base loss may be fused with terms.

    Raises:
        GradientError: the gradients cannot be compared.
    """
    by_tensors = partial(differentiate, inputs=targets)
    if isinstance(wrt, DistributedDataParallel):
        compare = partial(_gram_of_means, like=targets, group=wrt.process_group)
        return DistributedInputs(
            named, space, targets, by_tensors, compare,
            float(share), Ranks.of(wrt.process_group, share), kept, fuse_base=fuse_base,
        )  # fmt: skip
    if wrt is not None and is_fully_sharded(wrt):
        managed = FullyShardedParameters(wrt)
        compare = partial(sharded_gram, like=managed.parameters)
        return DistributedInputs(
            named, space, managed.parameters, managed.differentiate, compare,
            float(share), Ranks.of(group, share), kept, fuse_base=fuse_base,
        )  # fmt: skip
    if not any(is_sharded(target) for target in targets):
        return None
    if wrt is None and any(is_sharded(target) and target.is_leaf for target in targets):
        # Under FSDP they are no leaves of the graph, and a gradient would be silently missing.
        raise GradientError(
            "norms with respect to sharded parameters need the module that holds them, got the "
            "parameters themselves: pass wrt=model."
        )
    # The processes compute one batch together: nothing is averaged.
    compare = partial(sharded_gram, like=targets)
    return DistributedInputs(
        named, space, targets, by_tensors, compare, float(share), fuse_base=fuse_base
    )


def with_parts(
    named: Mapping[str, Any],
    terms: Sequence[Term],
    share: float | Tensor = 1.0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Mapping[str, Any], Collection[str]]:
    """Inputs whose sharded parameters get gradients that are sharded as they are.

    torch computes on whole tensors where a tensor has fewer elements than there are processes, and
    leaves a whole gradient to the parameter; FSDP would add its part of the gradient to that.

    A process has the gradients of its own shards alone, nobody averages them: a term over them has
    to count with the mean share S of the processes, not with the share s of one. Their gradients
    are multiplied by S / s. In a process whose share is 0 they are multiplied by S, and the terms
    that read them are returned: their gradients must not be multiplied by the share there.

    Args:
        named: the inputs of the terms, by name.
        terms: the terms that are due.
        share: factor on the terms of this process.
        group: the processes; None: all of them.

    Returns:
        The inputs, and the names of those terms.

    Raises:
        InputError: an offloaded term reads a sharded tensor; or with unequal shares the base loss
            does, or with a share of 0 a term that reads other differentiable inputs too.
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
        return named, ()
    for term in terms:
        if not runs_in_graph(term.spec) and any(map(is_sharded, tensors_in(_read_by(term, named)))):
            # In a thread of its own its collective operations would meet those of other terms.
            raise InputError(
                f"{title(term.name)} reads a sharded tensor and must run inline, without a timeout "
                f"and with gradient='auto', got run_in={term.spec.run_in!r}: run it inline, or "
                f"pass it the whole tensor, x.full_tensor()."
            )
    # A projection has rows of its own: the gradient of its layer is averaged over the processes.
    own_rows: Mapping[str, Any] = mapped(
        named, lambda projection: mapped(projection, as_it_is), Projection
    )
    if not any(map(_is_shard, tensors_in(own_rows))):
        return own_rows, ()
    # Also where the share is 1: it may be another one in other processes, which reduce it.
    shares = _shares_of(share, group)
    own, mean = float(share), fmean(shares)
    readers = [term for term in terms if any(map(_is_shard, tensors_in(_read_by(term, own_rows))))]
    _check_readers(readers, own_rows, shares)
    scale = mean / own if own else mean
    inputs: Mapping[str, Any] = mapped(own_rows, as_it_is if scale == 1 else scaled)
    return inputs, () if own else frozenset(term.name for term in readers)


def _read_by(term: Term, named: Mapping[str, Any]) -> Any:
    if isinstance(term.spec.fn, Reads):
        return term.spec.fn.arguments(named)
    return [named[name] for name in ("data", "logprobs", *term.spec.needs)]


def _shares_of(share: float | Tensor, group: dist.ProcessGroup | None) -> list[float]:
    """The share of each process; a collective operation."""
    ranks = Ranks.of(group, share)
    return [float(share)] if ranks is None else ranks.shares()


def _check_readers(
    readers: Sequence[Term], named: Mapping[str, Any], shares: Sequence[float]
) -> None:
    """Check that one factor on the gradients of the shards is right for all that read them.

    In all processes alike: one that fails alone would leave the others waiting.
    """
    for term in readers:
        if term.is_base and len(set(shares)) > 1:
            raise InputError(
                f"a base loss that reads sharded parameters needs the same share in every process, "
                f"got shares of {min(shares):g} to {max(shares):g}: make what it adds a term."
            )
        others = requiring_grad(_read_by(term, named))
        if 0 in shares and not all(map(_is_shard, others)):
            raise InputError(
                f"{title(term.name)} reads sharded parameters and other differentiable inputs, and "
                f"needs a share above 0 in every process, got 0: a micro-batch has no token that "
                f"counts; read the parameters alone, or drop such batches."
            )


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
