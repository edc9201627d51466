"""Processes of data-parallel training, each of which computes the loss of its part of a batch.

DDP and FSDP average the gradients of the processes, so the step follows the mean of their losses.
The weight of a bounded term and the state of a term depend on values; for a step that equals that
of one process they have to follow the values of the whole batch, not of the part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributed as dist


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
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, (self.share, own), group=self.group)
        return found


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
