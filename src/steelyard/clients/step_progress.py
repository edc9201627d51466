"""Measured progress: what an optimizer step did to each term, by one more forward pass.

A gradient norm says how strongly a term could pull; a step is the work of all terms together, of
the optimizer's moments and of clipping. Its effect on a term is measured: the value on the same
batch after the step, minus that before. This needs log-probs alone, and works for any client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from steelyard.clients.client_pass import logprobs_of, submit_forward
from steelyard.composition import Pipeline
from steelyard.execution import Workers
from steelyard.output import CustomLossOutput
from steelyard.spec import BASE, RegularizerSpec, measurement


@dataclass(frozen=True)
class MeasuredCall:
    """The call before an optimizer step that is to be measured.

    Attributes:
        data: its batch.
        logprobs: of the batch, before the step.
        specs: of the base loss, first, and of the terms that ran.
        output: their values.
        timeout: seconds each term may take.
        workers: the pools that run offloaded terms.
    """

    data: list[Any]
    logprobs: list[Tensor]
    specs: Sequence[RegularizerSpec]
    output: CustomLossOutput
    timeout: float
    workers: Workers | None


class StepProgress:
    """Measurement of one optimizer step.

    Its forward pass is submitted when it is built, so that it runs right after the step.

    Args:
        client: the training client, after its `optim_step` was called.
        call: the last call before that.
    """

    def __init__(self, client: Any, call: MeasuredCall) -> None:
        self._call = call
        self._changes: dict[str, float] | None = None
        base, *terms = call.specs
        # The value of these in training may be another quantity than `measure` gives, or may
        # depend on a state that has advanced since: they are measured before the step as well.
        self._twice = {spec.name for spec in call.specs if _is_redefined(spec)}
        measurable = [
            spec
            for spec in terms
            if spec.name in call.output.regularizers
            # The extra inputs before the step are gone.
            and not (spec.needs and spec.name in self._twice)
        ]
        # Copies, made now: the state of a term advances with the next call, and with each of these.
        self._terms_after = _Terms(base, measurable)
        again = [spec for spec in measurable if spec.name in self._twice]
        self._terms_before = _Terms(base, again) if self._twice else None
        needs = tuple(dict.fromkeys(need for spec in measurable for need in spec.needs))
        if needs:
            after = client.open_pass(call.data, needs, keep_graph=False)
            self._after = lambda: (after.logprobs, after.given)
        else:
            future = submit_forward(client, call.data)
            self._after = lambda: (logprobs_of(future.result()), {})

    def changes(self) -> dict[str, float]:
        """Value after the step minus value before, by name; a term that fails is left out."""
        if self._changes is None:
            logprobs, given = self._after()
            after = self._terms_after.values(self._call, logprobs, given)
            before = self._values_before()
            self._changes = {
                name: value - before[name] for name, value in after.items() if name in before
            }
        return dict(self._changes)

    def _values_before(self) -> dict[str, float]:
        output = self._call.output
        values = {BASE: output.base_loss.value}
        values |= {name: term.value for name, term in output.regularizers.items()}
        if self._terms_before is not None:
            measured = self._terms_before.values(self._call, self._call.logprobs, {})
            values |= {name: measured[name] for name in self._twice if name in measured}
        return values


class _Terms:
    """Copies of the base loss and of terms, which measure and leave the training alone."""

    def __init__(self, base: RegularizerSpec, terms: Sequence[RegularizerSpec]) -> None:
        self._base = measurement(base.fn)
        self._specs = [spec.measuring() for spec in terms]

    def values(
        self, call: MeasuredCall, logprobs: list[Tensor], given: Mapping[str, Any]
    ) -> dict[str, float]:
        """Values by name; of a call with other log-probs."""
        pipeline = Pipeline(
            self._base, self._specs, timeout=call.timeout, workers=call.workers, gives=given
        )
        output = pipeline.compute(call.data, logprobs, given=given)
        terms = {name: term.value for name, term in output.regularizers.items()}
        return {BASE: output.base_loss.value} | terms


def _is_redefined(spec: RegularizerSpec) -> bool:
    return spec.stateful is not None or hasattr(spec.fn, "measure")
