"""Measured progress: what an optimizer step did to each term, by one more forward pass.

A gradient norm belongs to one term; a step is the result of all terms together, of the learning
rate, of moments and of clipping. Its effect on a term is measured: the value on the
same batch after the step, minus that before. This needs log-probs alone, and works for any client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from steelyard.clients.client_pass import at_temperature, config_at, logprobs_of, submit_forward
from steelyard.composition import Pipeline
from steelyard.execution import Workers
from steelyard.output import CustomLossOutput
from steelyard.spec import BASE, RegularizerSpec, measurement


class StepProgress:
    """Measurement of one optimizer step, built from the last call before it.

    Args:
        data: the batch of that call.
        logprobs: of the batch, before the step.
        specs: of the base loss, first, and of the terms that were due.
        output: of that call.
        timeout: seconds each term may take.
        workers: the pools that run offloaded terms; None is those that the process shares.
        temperature: of the policy, of which the log-probs are.
    """

    def __init__(
        self,
        data: Sequence[Any],
        logprobs: list[Tensor],
        specs: Sequence[RegularizerSpec],
        output: CustomLossOutput,
        timeout: float,
        workers: Workers | None,
        temperature: float = 1.0,
    ) -> None:
        self._temperature = temperature
        self._data, self._logprobs, self._output = list(data), logprobs, output
        self._settings: dict[str, Any] = {"timeout": timeout, "workers": workers}
        # The value of these in training may be another quantity than `measure` gives, or may
        # depend on a state that has advanced since: they are measured before the step as well.
        self._twice = {spec.name for spec in specs if _is_redefined(spec)}
        base, *terms = specs
        measurable = [
            spec
            for spec in terms
            if spec.name in output.regularizers
            # The extra inputs before the step are gone when it is measured.
            and not (spec.needs and spec.name in self._twice)
        ]
        # Copies, each used once: every call of a term with state advances it.
        self._after = measurement(base.fn), list(_copies(measurable))
        again = [spec for spec in measurable if spec.name in self._twice]
        self._before = measurement(base.fn), list(_copies(again))
        self._forward: Callable[[], tuple[list[Tensor], Mapping[str, Any]]] | None = None
        self._changes: dict[str, float] | None = None

    def begin(self, client: Any) -> None:
        """Submit the forward pass, so that it runs right after the step that was submitted."""
        needs = tuple(dict.fromkeys(need for spec in self._after[1] for need in spec.needs))
        if needs:
            at = at_temperature(self._temperature)
            opened = client.open_pass(self._data, needs, keep_graph=False, **at)
            self._forward = lambda: (opened.logprobs, opened.given)
        else:
            future = submit_forward(client, self._data, config_at(self._temperature))
            self._forward = lambda: (logprobs_of(future.result()), {})

    def changes(self) -> dict[str, float]:
        """Value after the step minus value before, by name; a term that fails is left out."""
        if self._changes is None and self._forward is not None:
            after = self._values(*self._after, *self._forward())
            before = self._values_before()
            self._changes = {
                name: value - before[name] for name, value in after.items() if name in before
            }
        return dict(self._changes or {})

    def _values_before(self) -> dict[str, float]:
        values = _values_of(self._output)
        if not self._twice:
            return values
        measured = self._values(*self._before, self._logprobs, {})
        kept = {name: value for name, value in values.items() if name not in self._twice}
        return kept | {name: measured[name] for name in self._twice if name in measured}

    def _values(
        self,
        base: Any,
        specs: Sequence[RegularizerSpec],
        logprobs: list[Tensor],
        given: Mapping[str, Any],
    ) -> dict[str, float]:
        pipeline = Pipeline(base, specs, **self._settings, gives=given)
        return _values_of(pipeline.compute(self._data, logprobs, given=given))


def _values_of(output: CustomLossOutput) -> dict[str, float]:
    terms = {name: term.value for name, term in output.regularizers.items()}
    return {BASE: output.base_loss.value} | terms


def _is_redefined(spec: RegularizerSpec) -> bool:
    return spec.stateful is not None or hasattr(spec.fn, "measure")


def _copies(specs: Sequence[RegularizerSpec]) -> Iterable[RegularizerSpec]:
    for spec in specs:
        try:
            yield spec.measuring()
        except Exception:  # noqa: BLE001, S112 - a term with state that cannot be copied is left out
            continue
