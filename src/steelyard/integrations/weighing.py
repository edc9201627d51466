"""One call of a composite: read the terms, drop what failed and may, add up the rest."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import replace
from functools import reduce
from operator import add
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from steelyard import telemetry
from steelyard.composition import Pipeline
from steelyard.composition.events import CallEvents
from steelyard.composition.term import Term
from steelyard.integrations.inputs import Inputs
from steelyard.integrations.norms import term_pulls
from steelyard.integrations.reading import Reading, differentiable, read_traced
from steelyard.integrations.round import read_all
from steelyard.integrations.weighed import Weighed
from steelyard.telemetry import events as told

Share: TypeAlias = float | Tensor

_NUMBERS_TOLD = (told.CUSTOM_LOSS_STOP, told.GRADIENT, told.TERM_STOP, told.COMPOSE_COMPLETE)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it so
def weigh(
    pipeline: Pipeline,
    inputs: Inputs,
    step: int,
    *,
    share: Share = 1.0,
    wrt: Sequence[Tensor] | None,
    tracked: bool,
) -> tuple[Tensor, Weighed]:
    """The weighted total with its graph, and the numbers behind it; telemetry hears of both.

    Args:
        pipeline: holds the terms.
        inputs: what they read, by name.
        step: the number of this step.
        share: what part of the regularizers' sum to add.
        wrt: what norms are with respect to; None is the inputs.
        tracked: whether to compute norms this time.

    Raises:
        SpecError: a schedule yields a bad weight at this step.
        TermError: the base loss failed, or a term that may not.
    """
    events = CallEvents(
        {
            "model_id": pipeline.model_id,
            "data_count": _count(inputs.get("data")),
            "regularizer_count": len(pipeline.specs),
            "track_grad_norms": tracked,
        }
    )
    try:
        targets = differentiable(inputs if wrt is None else wrt) if tracked else []
        read = read_all(pipeline, inputs, step, targets, with_base=_is_whole(share))
        began = perf_counter()
        total = _added(read.readings, share, [group.total for group in read.groups])
        pull = read.pull
        if targets and pull is None:
            pull = term_pulls(read.readings, targets)
    except BaseException as error:
        events.exception(error)
        raise
    weighed = Weighed(
        [replace(reading, value=reading.value.detach()) for reading in read.readings],
        read.skipped,
        tuple(spec.name for spec in pipeline.specs if not spec.due(step)),
        pull,
        "inputs" if wrt is None else "parameters",
    )
    if any(telemetry.listening(event) for event in _NUMBERS_TOLD):
        _tell(events, weighed, began)
    return total, weighed


def weigh_traced(
    due: Sequence[Term], weights: Tensor, inputs: Inputs, share: Share, not_run: tuple[str, ...]
) -> tuple[Tensor, Weighed]:
    """The same while a compiler watches: tensors alone, no events, no failures to catch."""
    readings = [read_traced(term, weights[i], inputs) for i, term in enumerate(due)]
    kept = [replace(reading, value=reading.value.detach()) for reading in readings]
    return _added(readings, share), Weighed(kept, not_run=not_run)


def _added(readings: Sequence[Reading], share: Share, groups: Sequence[Tensor] = ()) -> Tensor:
    """Base + weight * term + ..., in the order in which a person would write it.

    Args:
        readings: the base loss first.
        share: what part of the regularizers' sum counts.
        groups: the totals of those that were computed together.
    """
    base, *rest = readings
    parts = [] if base.fused else [base.value]
    parts += [reading.weight * reading.value for reading in rest if not reading.fused]
    parts += groups
    if _is_whole(share):
        return reduce(add, parts)
    return parts[0] + share * sum(parts[1:])


def _is_whole(share: Share) -> bool:
    return not isinstance(share, Tensor) and share == 1


def _count(data: object) -> int | None:
    return len(data) if isinstance(data, Sized) else None


def _tell(events: CallEvents, weighed: Weighed, began: float) -> None:
    output = weighed.output
    for reading in weighed.readings:
        name = reading.term.name
        norm = weighed.pull.norms.get(name) if weighed.pull is not None else None
        reading.report(weighed.numbers[name][0], norm)
    events.composed(began, output)
    events.stop(output)
