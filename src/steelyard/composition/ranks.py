"""Processes of data-parallel training, each of which computes the loss of its part of a batch.

DDP and FSDP average the gradients of the processes, so the step follows the mean of their losses.
The weight of a bounded term and the state of a term depend on values; for a step that equals that
of one process they have to follow the values of the whole batch, not of the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributed as dist

from steelyard.composition.call_events import as_term_error
from steelyard.composition.input_names import Reads
from steelyard.composition.inputs import Inputs
from steelyard.composition.terms import Term, TermResult
from steelyard.errors import InputError
from steelyard.gradients.isolated import IsolatedCall, ValueAndGradient
from steelyard.gradients.layout import Nest, mapped, tensors_in
from steelyard.spec.error_messages import title


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that compute one loss together.

    Attributes:
        group: the processes; None: all of them.
        share: factor on this process's terms, as in `CompositeLoss`: with unequal numbers of
            tokens, a mean over all tokens weights the processes by it.
    """

    group: dist.ProcessGroup | None
    share: float

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, share: float | Tensor) -> Self | None:
        """The processes that make this call together; None if this one is alone.

        A call without gradients is not a call of training, which every process makes: one process
        may evaluate alone, and must not wait for the others.
        """
        if not torch.is_grad_enabled() or not dist.is_available() or not dist.is_initialized():
            return None
        return cls(group, float(share)) if dist.get_world_size(group) > 1 else None

    def means(
        self, terms: Sequence[float | None], others: Sequence[float]
    ) -> tuple[list[float | None], list[float]]:
        """Means over the processes, by one reduction.

        Args:
            terms: numbers that are weighted by the share, Σ share · number / Σ share; None where
                this process has none, and in the result where no process has one.
            others: numbers that all processes have, and that count the same.
        """
        rows = [(0.0, 0.0) if x is None else (self.share * x, self.share) for x in terms]
        summed = sum_over_ranks([*rows, *((number, 1.0) for number in others)], self.group)
        means = [total / factor if factor else None for total, factor in summed]
        return means[: len(terms)], [mean or 0.0 for mean in means[len(terms) :]]

    def shares(self) -> list[float]:
        """The share of each process, in the order of their ranks, by one reduction."""
        row = [0.0] * dist.get_world_size(self.group)
        row[dist.get_rank(self.group)] = self.share
        return sum_over_ranks([row], self.group)[0]

    def gather(self, own: Any) -> list[tuple[float, Any]]:
        """The share and an object of each process, in the order of their ranks."""
        gathered: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(gathered, (self.share, own), group=self.group)
        return gathered


def sum_over_ranks(
    rows: Sequence[Sequence[float]], group: dist.ProcessGroup | None
) -> list[list[float]]:
    """Sum a table of numbers over the processes of a group, in float64."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    table = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(table, group=group)
    summed: list[list[float]] = table.tolist()
    return summed


def mean_state(weighted: Sequence[tuple[float, Any]]) -> Any:
    """Mean of several states of a term: of numbers and float tensors; of others the last one.

    Args:
        weighted: a factor and a state each. A state of None counts only if all are None: a term
            that was skipped in one process has not begun there.
    """
    present = [(factor, state) for factor, state in weighted if state is not None]
    states = [state for _, state in present]
    if not states:
        return None
    last = states[-1]
    if isinstance(last, Mapping):
        if not all(isinstance(state, Mapping) and state.keys() == last.keys() for state in states):
            return last
        return {key: mean_state([(f, state[key]) for f, state in present]) for key in last}
    # Equal numbers are not rounded: a term may check that its state lies between two limits.
    if not _can_be_averaged(states) or (isinstance(last, float) and len(set(states)) == 1):
        return last
    total = sum(factor for factor, _ in present)
    factors = [factor / total if total else 1 / len(present) for factor, _ in present]
    return sum(factor * state for factor, state in zip(factors, states, strict=True))


def _can_be_averaged(states: Sequence[Any]) -> bool:
    if all(isinstance(state, float) for state in states):
        return True
    return all(
        isinstance(state, Tensor) and state.is_floating_point() and state.shape == states[0].shape
        for state in states
    )


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
            gradients = _gradients(whole.value, leaves)
            parts.append((plain, [None if g is None else factor * g for g in gradients]))
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
    gradients = torch.autograd.grad(value, wanted, retain_graph=True, allow_unused=True)
    remaining = iter(gradients)
    return [next(remaining) if leaf.requires_grad else None for leaf in leaves]
