"""One call of a composite: read the terms, drop what failed and may, add up the rest."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import replace
from time import perf_counter
from typing import TypeAlias

import torch
from torch import Tensor

from steelyard import telemetry
from steelyard.composition import DetachedTermWarning, Pipeline
from steelyard.composition.events import CallEvents, TermEvents
from steelyard.composition.part import dropped
from steelyard.composition.term import Term
from steelyard.errors import NonFiniteError
from steelyard.gradients.returned import check_finite
from steelyard.integrations.apart import read_apart, runs_apart
from steelyard.integrations.inputs import Inputs
from steelyard.integrations.norms import term_pulls
from steelyard.integrations.reading import Reading, differentiable, read_inline, read_traced
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
        readings, skipped = _read(pipeline, inputs, step)
        began = perf_counter()
        total = _added(readings, share)
        pull = None
        targets = differentiable(inputs if wrt is None else wrt) if tracked else []
        if targets:
            pull = term_pulls(readings, targets)
    except BaseException as error:
        events.exception(error)
        raise
    weighed = Weighed(
        [replace(reading, value=reading.value.detach()) for reading in readings],
        skipped,
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


def _read(pipeline: Pipeline, inputs: Inputs, step: int) -> tuple[list[Reading], dict[str, str]]:
    due = pipeline.due(step)
    apart = [term for term in due if runs_apart(term.spec)]
    found, skipped = read_apart(apart, inputs, step, pipeline.settings, pipeline.workers)
    by_name = {reading.term.name: reading for reading in found}
    for term in due:
        if term not in apart:
            weight = term.spec.weight_at(step)
            events = TermEvents(term, weight, "inline")
            try:
                by_name[term.name] = read_inline(term, weight, inputs, events)
            except DetachedTermWarning:  # somebody makes errors of warnings
                raise
            except Exception as error:  # noqa: BLE001 - whatever the term raised
                skipped[term.name] = dropped(term, events, error)
    readings = [by_name[term.name] for term in due if term.name in by_name]
    if pipeline.settings.check_finite:
        readings = _finite(readings, skipped)
    return readings, skipped


def _finite(readings: Sequence[Reading], skipped: dict[str, str]) -> list[Reading]:
    numbers = Weighed(readings).numbers
    kept = []
    for reading in readings:
        name = reading.term.name
        try:
            check_finite(name, numbers[name][0])
        except NonFiniteError as error:
            assert reading.events is not None  # noqa: S101 - for mypy: outside a compiled function
            skipped[name] = dropped(reading.term, reading.events, error)
        else:
            kept.append(reading)
    return kept


def _added(readings: Sequence[Reading], share: Share) -> Tensor:
    """Base + weight * term + ..., in the order in which a person would write it."""
    base, *rest = readings
    if not isinstance(share, Tensor) and share == 1:
        total = base.value
        for reading in rest:
            total = total + reading.weight * reading.value
        return total
    terms = sum(reading.weight * reading.value for reading in rest)
    return base.value + share * terms


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
