"""What a call of a pipeline tells telemetry."""

from __future__ import annotations

import time
from typing import Any

from steelyard import telemetry
from steelyard.composition.term import Place, Term
from steelyard.gradients import Evaluation
from steelyard.output import CustomLossOutput
from steelyard.telemetry import events


class CallEvents:
    """The events of one whole call."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self._began = time.perf_counter()
        telemetry.execute(events.CUSTOM_LOSS_START, {"system_time": time.time()}, metadata)

    def stop(self, output: CustomLossOutput) -> None:
        """The call gave `output`."""
        measurements = {
            "duration": time.perf_counter() - self._began,
            "loss_total": output.loss_total,
            "regularizer_total": output.regularizer_total,
            "total_grad_norm": output.total_grad_norm,
        }
        telemetry.execute(events.CUSTOM_LOSS_STOP, measurements, self._metadata)

    def exception(self, error: BaseException) -> None:
        """The call failed."""
        telemetry.execute(
            events.CUSTOM_LOSS_EXCEPTION,
            {"duration": time.perf_counter() - self._began},
            {**self._metadata, "reason": error},
        )

    def composed(self, began: float, output: CustomLossOutput) -> None:
        """The terms were joined into the total, from `began` on."""
        measurements = {
            "duration": time.perf_counter() - began,
            "loss_total": output.loss_total,
            "regularizer_total": output.regularizer_total,
        }
        metadata = {"regularizer_count": len(output.regularizers)}
        telemetry.execute(events.COMPOSE_COMPLETE, measurements, metadata)


class TermEvents:
    """The events of one regularizer in one call; the base loss has none of its own."""

    def __init__(self, term: Term, weight: float, place: Place) -> None:
        self._silent = term.is_base
        self._weight = weight
        self._began = time.perf_counter()
        self._metadata = {
            "regularizer_name": term.name,
            "weight": weight,
            "is_async": place == "async" or term.spec.is_async,
            "run_in": place,
        }

    def start(self) -> None:
        """The term begins."""
        self._began = time.perf_counter()
        if not self._silent:
            telemetry.execute(events.TERM_START, {"system_time": time.time()}, self._metadata)

    def stop(self, evaluation: Evaluation, grad_norm: float | None) -> None:
        """The term gave `evaluation`. Told when the gradients of all terms are combined."""
        if self._silent:
            return
        measurements = {
            "duration": evaluation.duration,
            "value": evaluation.value,
            "contribution": self._weight * evaluation.value,
            "grad_norm": grad_norm,
        }
        telemetry.execute(events.TERM_STOP, measurements, self._metadata)

    def gradient(self, method: str, duration: float) -> None:
        """The term was differentiated."""
        metadata = {"regularizer_name": self._metadata["regularizer_name"], "method": method}
        telemetry.execute(events.GRADIENT, {"duration": duration}, metadata)

    def exception(self, error: BaseException) -> None:
        """The term failed."""
        if not self._silent:
            telemetry.execute(
                events.TERM_EXCEPTION,
                {"duration": time.perf_counter() - self._began},
                {**self._metadata, "reason": error},
            )
