"""Telemetry events of one call, and the failures of its terms: raised, or skipped for the step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sized
from typing import Any

from steelyard import telemetry
from steelyard.composition.terms import TermResult
from steelyard.errors import InputError, TermError
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.error_messages import describe, quote_own_code, title
from steelyard.telemetry import events
from steelyard.telemetry.bus import listening

CALL_EVENTS = tuple(event for event in events.ALL if not event.startswith("steelyard.penalties."))
_WITH_NUMBERS = (
    events.CUSTOM_LOSS_STOP,
    events.GRADIENT,
    events.TERM_STOP,
    events.COMPOSE_COMPLETE,
)


class CallEvents:
    """Emits the events of one call; built only if a handler is attached to one of `CALL_EVENTS`."""

    def __init__(
        self, model_id: str | None, data: object, regularizer_count: int, *, tracked: bool
    ) -> None:
        self._began = time.perf_counter()
        self._metadata = {
            "model_id": model_id,
            "data_count": len(data) if isinstance(data, Sized) else None,
            "regularizer_count": regularizer_count,
            "track_grad_norms": tracked,
        }
        measured = {"system_time": time.time()}
        telemetry.execute(events.CUSTOM_LOSS_START, measured, self._metadata)

    def term_started(self, result: TermResult) -> None:
        """Emit the start event of a regularizer, once."""
        if not result.started:
            result.started = time.perf_counter()
            if not result.term.is_base:
                measured = {"system_time": time.time()}
                telemetry.execute(events.TERM_START, measured, _metadata(result))

    def term_failed(self, result: TermResult, failure: TermError) -> None:
        """Emit the exception event of a regularizer."""
        if not result.term.is_base:
            began = result.started or self._began
            measured = {"duration": time.perf_counter() - began}
            metadata = {**_metadata(result), "reason": failure}
            telemetry.execute(events.TERM_EXCEPTION, measured, metadata)

    def wants_numbers(self) -> bool:
        """Whether a handler reads values, which may have to be copied from a device."""
        return listening(*_WITH_NUMBERS)

    def stop(self, results: Iterable[TermResult], output: CustomLossOutput, began: float) -> None:
        """Emit the stop events of the terms and of the call; composing them started at `began`."""
        for result in results:
            if result.skipped is None and (result.measured or result.started):
                self._term_stopped(result, output)
        totals = {
            "loss_total": output.loss_total,
            "regularizer_total": output.regularizer_total,
        }
        now = time.perf_counter()
        metadata = {"regularizer_count": len(output.regularizers)}
        telemetry.execute(events.COMPOSE_COMPLETE, {"duration": now - began, **totals}, metadata)
        whole = {**totals, "total_grad_norm": output.total_grad_norm}
        measured = {"duration": now - self._began, **whole}
        telemetry.execute(events.CUSTOM_LOSS_STOP, measured, self._metadata)

    def exception(self, error: BaseException) -> None:
        """Emit the exception event of the call."""
        measured = {"duration": time.perf_counter() - self._began}
        metadata = {**self._metadata, "reason": error}
        telemetry.execute(events.CUSTOM_LOSS_EXCEPTION, measured, metadata)

    def _term_stopped(self, result: TermResult, output: CustomLossOutput) -> None:
        name = result.term.name
        if result.method is not None and result.gradient_duration is not None:
            metadata = {"regularizer_name": name, "method": result.method}
            telemetry.execute(events.GRADIENT, {"duration": result.gradient_duration}, metadata)
        if not result.term.is_base:
            regularizer = output.regularizers.get(name)  # None if it had nothing to measure
            measured = {
                "duration": result.duration,
                "value": regularizer and regularizer.value,
                "contribution": regularizer and regularizer.contribution,
                "grad_norm": regularizer and regularizer.grad_norm,
            }
            telemetry.execute(events.TERM_STOP, measured, _metadata(result))


def _metadata(result: TermResult) -> dict[str, Any]:
    return {
        "regularizer_name": result.term.name,
        "weight": result.weight,
        "is_async": result.executor == "async" or result.term.spec.is_async,
        "run_in": result.executor,
    }


def skip(result: TermResult, error: BaseException, events: CallEvents | None = None) -> None:
    """Report the failure of a term, and skip the term for this step if `on_error="skip"`.

    A skipped term has no value and no gradient. Its reason, `result.skipped`, goes to
    `CustomLossOutput.skipped`.

    Raises:
        TermError: it is the base loss, or its `on_error` is `"raise"`.
    """
    failure = as_term_error(result.term.name, error)
    if events is not None:
        events.term_failed(result, failure)
    if result.term.is_base or result.term.spec.on_error == "raise":
        quote_own_code(failure)
        raise failure
    result.value, result.number, result.gradients, result.group = None, None, {}, None
    result.skipped = failure.reason or describe(failure)
    result.failed_at = failure.datum


def as_term_error(name: str, error: BaseException) -> TermError:
    """Wrap an error as a `TermError` of the term, unless it is one already."""
    if isinstance(error, TermError) and error.term == name:
        return error
    reason = describe(error)
    # The user's own errors may have any attributes.
    datum = error.datum if isinstance(error, InputError | TermError) else None
    failure = TermError(f"{title(name)} failed: {reason}", term=name, datum=datum, reason=reason)
    failure.__cause__ = error
    return failure
