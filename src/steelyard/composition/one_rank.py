"""Terms with `ranks="one"`: one process evaluates them, on the batches of all processes.

The first process gathers the inputs that such a term reads and evaluates it once, on the whole
batch: a judge behind HTTP gets one request a step, however many processes train. The value v and
∂v/∂inputs of each process go back to it. Averaging then gives the gradient of one process on the
whole batch: with shares sᵣ, process r adds sᵣ · weight · v to its loss and the step follows
Σᵣ sᵣ gᵣ / R, which is (Σᵣ sᵣ / R) · weight · ∂v/∂θ for gᵣ = weight · (Σ s / sᵣ) · ∂v/∂inputsᵣ · ….
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from steelyard.composition.input_names import Reads
from steelyard.composition.inputs import Inputs
from steelyard.composition.ranks import Ranks
from steelyard.composition.skips import as_term_error
from steelyard.composition.terms import Term, TermResult
from steelyard.errors import InputError
from steelyard.gradients import IsolatedCall, Nest, ValueAndGradient, mapped, tensors_in
from steelyard.spec import title


@dataclass(frozen=True, eq=False)
class _Gathered:
    """A term on the whole batch, in the first process.

    Attributes:
        inputs: the inputs of all processes, merged.
        leaves: the tensors of each process that they were merged from.
        shares: of each process.
    """

    inputs: Inputs
    leaves: Sequence[Sequence[Tensor]]
    shares: Sequence[float]


class WholeBatch:
    """Evaluations of terms on the batches of all processes.

    Every process has to call both methods for the same terms in the same order.

    Args:
        inputs: of this process.
        ranks: the processes.
    """

    def __init__(self, inputs: Inputs, ranks: Ranks) -> None:
        self._inputs, self._ranks = inputs, ranks
        self._gathered: dict[str, _Gathered] = {}
        self._outcomes: dict[str, ValueAndGradient | BaseException] = {}

    def isolated(self, result: TermResult, *, check_finite: bool) -> IsolatedCall | None:
        """Gather the inputs of a term; the call on all of them, or None in other processes.

        It is None too if an input cannot be merged; `deliver` then raises in every process.

        Raises:
            InputError: the term reads the parameters.
        """
        group, term = self._ranks.group, result.term
        mine = {name: self._inputs.named[name] for name in _names(term, self._inputs.named)}
        first = dist.get_rank(group) == 0
        parts: list[Any] | None = [None] * dist.get_world_size(group) if first else None
        sent = (self._ranks.share, mapped(mine, _plain))
        dist.gather_object(sent, parts, group=group, group_dst=0)
        if parts is None:
            return None
        nests = [nest for _, nest in parts]
        leaves = [list(tensors_in(nest)) for nest in nests]
        shares = [share for share, _ in parts]
        inputs = self._inputs
        try:
            merged = {name: _merge(name, [nest[name] for nest in nests]) for name in mine}
            inputs = Inputs(merged, inputs.main_space)
            return inputs.isolated(term, check_finite=check_finite)
        except InputError as error:
            self.settle(result, error)
            return None
        finally:
            self._gathered[term.name] = _Gathered(inputs, leaves, shares)

    def settle(self, result: TermResult, outcome: ValueAndGradient | BaseException) -> None:
        """Keep the evaluation of a term, or its error, until it is sent."""
        self._outcomes[result.term.name] = outcome

    def deliver(self, result: TermResult) -> ValueAndGradient:
        """Send the evaluation of a term to all processes, each with its own gradients.

        The gradient is attached to the result.

        Raises:
            TermError: it failed.
        """
        group, name = self._ranks.group, result.term.name
        parts = self._parts(result) if name in self._gathered else None
        received: list[Any] = [None]
        dist.scatter_object_list(received, parts, group=group, group_src=0)
        evaluation: ValueAndGradient | BaseException
        evaluation, gradients = received[0]
        if isinstance(evaluation, BaseException):
            raise evaluation
        if gradients is None:
            return evaluation
        mine = {key: self._inputs.named[key] for key in _names(result.term, self._inputs.named)}
        tensors = list(tensors_in(mine))
        pairs = [
            (tensor, gradient.to(tensor))
            for tensor, gradient in zip(tensors, gradients, strict=True)
            if gradient is not None
        ]
        like = tensors[0] if tensors else torch.empty(0)
        self._inputs.attach(result, evaluation, pairs, like=like)
        return evaluation

    def _parts(self, result: TermResult) -> list[Any]:
        """Message to each process: the evaluation, and the gradients of its inputs."""
        name = result.term.name
        gathered, outcome = self._gathered.pop(name), self._outcomes.pop(name)
        if isinstance(outcome, BaseException):
            # As a term error, which can be pickled: the error of a term may not be.
            return [(as_term_error(name, outcome), None)] * len(gathered.shares)
        if outcome.value is None:
            return [(outcome, None)] * len(gathered.shares)
        whole = replace(result, value=None)
        gathered.inputs.accept(whole, outcome)
        plain = replace(outcome, gradient=None, extra={})
        total = sum(gathered.shares)
        parts = []
        for share, leaves in zip(gathered.shares, gathered.leaves, strict=True):
            factor = total / share if share else 0.0
            found = _gradients(whole.value, leaves)
            parts.append((plain, [None if g is None else factor * g for g in found]))
        return parts


def _names(term: Term, named: Mapping[str, Any]) -> list[str]:
    """Names of the inputs that a term reads, without what follows a dot.

    Raises:
        InputError: it reads the parameters.
    """
    fn = term.spec.fn
    read: Iterable[str] = ("data", "logprobs", *term.spec.needs)
    if isinstance(fn, Reads):
        read = (*fn.required, *fn.optional)
    tops = [name if name in named else name.partition(".")[0] for name in read]
    if "parameters" in tops:
        raise InputError(
            f"ranks='one' evaluates a term on the batches of all processes, and "
            f"{title(term.name)} reads parameters, which are no batch: use ranks='all'."
        )
    return [name for name in dict.fromkeys(tops) if name in named]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().requires_grad_(tensor.requires_grad)


def _merge(name: str, parts: Sequence[Nest]) -> Nest:
    """Merge one input of all processes.

    Tensors are concatenated along their first dimension, lists, which have one item per datum,
    are joined, and the items of tuples and mappings are merged one by one.
    """
    first = parts[0]
    kind = type(first) if len({type(part) for part in parts}) == 1 else None
    if kind is Tensor and first.dim() and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(list(parts))
    if kind is list:
        return [item for part in parts for item in part]
    if kind is tuple and len({len(part) for part in parts}) == 1:
        return tuple(_merge(name, items) for items in zip(*parts, strict=True))
    if kind is dict and all(part.keys() == first.keys() for part in parts):
        return {key: _merge(f"{name}.{key}", [part[key] for part in parts]) for key in first}
    if kind in (str, int, float, bool, type(None)) and all(part == first for part in parts):
        return first
    shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part) for part in parts]
    raise InputError(
        f"ranks='one' joins the inputs of all processes along their first dimension, and "
        f"{name!r} does not fit together, got {shapes}: read data and logprobs, lists with one "
        f"item per datum, or use ranks='all'."
    )


def _gradients(value: Tensor | None, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if value is None or not value.requires_grad or not wanted:
        return [None] * len(leaves)
    found = torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
    each = iter(found)
    return [next(each) if leaf.requires_grad else None for leaf in leaves]
