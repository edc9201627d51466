"""A call whose terms are evaluated elsewhere: its events, and its output from the results."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import Any

from steelyard import telemetry
from steelyard.composition.aggregate import Combined, build_output
from steelyard.composition.call_events import CALL_EVENTS, CallEvents
from steelyard.composition.inputs import LOGPROBS
from steelyard.composition.pipeline import Pipeline
from steelyard.composition.terms import Term, TermResult
from steelyard.gradients import check_finite, norms_and_cosines
from steelyard.output import CustomLossOutput


class RemoteCall:
    """A call of a pipeline's terms on a server that runs them as one uploaded loss.

    Args:
        pipeline: its terms, weights and settings.
        data: the batch.
        step: the number of the step.

    Attributes:
        terms: the base loss, and the regularizers that are due, in order.
        weights: of these terms at this step.

    Raises:
        SpecError: a schedule yields a bad weight.
        ClosedError: the pipeline is closed.
    """

    def __init__(self, pipeline: Pipeline, data: Any, step: int) -> None:
        pipeline.check_open()
        self._pipeline, self._data, self._step = pipeline, data, step
        self.terms: Sequence[Term] = pipeline.due(step)
        self.weights = [term.weight_at(step) for term in self.terms]
        names = {term.name for term in self.terms}
        self._not_run = [spec.name for spec in pipeline.specs if spec.name not in names]
        self._events: CallEvents | None = None
        self._began = perf_counter()

    def leave_out(self, names: Collection[str]) -> None:
        """Leave out the terms that have nothing to measure in the batch."""
        if not names:
            return
        pairs = [p for p in zip(self.terms, self.weights, strict=True) if p[0].name not in names]
        self.terms, self.weights = [term for term, _ in pairs], [weight for _, weight in pairs]
        self._not_run += names

    def start(self) -> None:
        """Emit the start events."""
        self._began = perf_counter()
        if telemetry.listening(*CALL_EVENTS):
            tracked = self._pipeline.settings.tracks(self._step)
            count = len(self._pipeline.specs)
            self._events = CallEvents(self._pipeline.model_id, self._data, count, tracked=tracked)

    def finish(
        self,
        values: Sequence[float],
        metrics: Sequence[Mapping[str, float]],
        products: Sequence[Sequence[float]] | None = None,
        squared_norm: float = 0.0,
        **more: Any,
    ) -> CustomLossOutput:
        """Build the output, and emit the stop events.

        Args:
            values: of the terms.
            metrics: their own metrics.
            products: Gram matrix of their gradients; None if they are not tracked.
            squared_norm: ‖total gradient‖², if they are tracked.
            more: further fields of the output.

        Raises:
            NonFiniteError: a value is not finite, and the pipeline checks that.
        """
        if self._pipeline.settings.check_finite:
            for term, value in zip(self.terms, values, strict=True):
                check_finite(term.name, value)
        for term, weight, value in zip(self.terms, self.weights, values, strict=True):
            term.warn_if_zero(value, weight, self._step)
        rows = zip(self.terms, self.weights, values, metrics, strict=True)
        results = [
            TermResult(
                term,
                weight,
                place="server",
                space=(LOGPROBS,),
                number=value,
                custom=own,
                method="autograd",
            )
            for term, weight, value, own in rows
        ]
        combined = Combined()
        if products is not None:
            names = [term.name for term in self.terms]
            norm = math.sqrt(squared_norm)
            combined = Combined({}, norm, *norms_and_cosines(names, products))
        output = build_output(
            results, combined, self._not_run, total_grad_norm=combined.total_norm, **more
        )
        if self._events is not None:
            for result in results:
                self._events.term_started(result)
            self._events.stop(results, output, self._began)
        return output

    def fail(self, error: BaseException) -> None:
        """Emit the exception event."""
        if self._events is not None:
            self._events.exception(error)
