"""Terms of a composite over the same logits, computed together: one read, one gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from steelyard.gradients import Method, Pull
from steelyard.integrations.inputs import Inputs
from steelyard.integrations.named import Reads
from steelyard.integrations.reading import Reading, Turn, differentiable
from steelyard.penalties.from_logits import ComposedLogits, Fused, LogitCall, fusable
from steelyard.penalties.from_logits.fusion import parameters_of


@dataclass(frozen=True, eq=False)
class Group:
    """Terms that can be computed together, as the calls they are."""

    turns: Sequence[Turn]
    calls: Fused

    def reads_only(self, targets: Sequence[Tensor]) -> bool:
        """Whether its gradients with respect to `targets` are those by its logits."""
        return len(targets) == 1 and targets[0] is self.calls.arrays["logits"]


@dataclass(frozen=True, eq=False)
class Together:
    """What came of a group.

    Attributes:
        readings: one for each term, with a value that has no graph.
        total: the weighted sum of them all, with its graph.
        pull: norms and cosines, if tracked.
    """

    readings: Sequence[Reading]
    total: Tensor
    pull: Pull | None = None


def groups_of(turns: Sequence[Turn], inputs: Inputs) -> list[Group]:
    """The terms that can be computed together, each in one group at most."""
    by_name = {turn.term.name: turn for turn in turns}
    calls = [call for call in (_call(turn, inputs) for turn in turns) if call is not None]
    return [Group([by_name[name] for name in each.names], each) for each in fusable(calls)]


def read_together(
    group: Group, inputs: Inputs, *, check_finite: bool, tracked: bool
) -> Together | None:
    """What came of a group; None if something is wrong with it.

    Then its terms are to be read one by one, which tells whose fault it is.

    Args:
        group: the terms.
        inputs: what they read.
        check_finite: whether a value that is not finite is a failure.
        tracked: whether norms and cosines by the logits are wanted.
    """
    for turn in group.turns:
        turn.begin()
    began = perf_counter()
    try:
        found = group.calls.compute(track_grad_norms=tracked)
    except Exception:  # noqa: BLE001 - whatever one of them raised
        return None
    values = [found.values[turn.term.name] for turn in group.turns]
    if check_finite and not bool(torch.stack(values).isfinite().all()):
        return None
    method: Method | None = "autograd" if found.total.requires_grad else None
    if method is None and differentiable(inputs):
        return None
    pull = _pull(found) if tracked else None
    each = (perf_counter() - began) / len(values)
    readings = [
        Reading(turn.term, turn.weight, value, {}, method, each, turn.events, fused=True)
        for turn, value in zip(group.turns, values, strict=True)
    ]
    return Together(readings, found.total, pull)


def _call(turn: Turn, inputs: Inputs) -> LogitCall | None:
    fn, spec = turn.term.spec.fn, turn.term.spec
    by_position = parameters_of(fn.fn) if isinstance(fn, Reads) else None
    if by_position is None or len(fn.names) > len(by_position) or spec.gradient == "none":
        return None
    positional, arrays = fn.arguments(inputs)
    arrays |= zip(by_position, positional, strict=False)
    return LogitCall(turn.term.name, fn.fn, arrays, turn.weight, spec.options)


def _pull(found: ComposedLogits) -> Pull:
    norms = {name: float(norm) for name, norm in found.grad_norms.items()}
    total_norm = norms.pop("total")
    cosines = {pair: float(cosine) for pair, cosine in found.cosines.items()}
    return Pull(torch.zeros(1), total_norm, norms, cosines)
