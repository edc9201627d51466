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
from steelyard.clients.client_settings import ClientSettings
from steelyard.composition.own_data import JoinedData
from steelyard.composition.pipeline import Pipeline
from steelyard.composition.settings import Settings
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.error_messages import BASE
from steelyard.spec.protocol import measurement
from steelyard.spec.regularizer import REFERENCE_INPUTS, RegularizerSpec


class StepProgress:
    """Measurement of one optimizer step, built from the last call before it.

    Args:
        data: of that call: the batch, or a `JoinedData`.
        logprobs: of the data, before the step.
        specs: of the base loss, first, and of the terms that were due.
        output: of that call.
        settings: of that call.
    """

    def __init__(
        self,
        data: Any,
        logprobs: list[Tensor],
        specs: Sequence[RegularizerSpec],
        output: CustomLossOutput,
        settings: ClientSettings,
    ) -> None:
        self._temperature = settings.temperature
        # Its values are compared, and no gradients.
        self._settings = Settings(timeout=settings.timeout, workers=settings.workers)
        self._data = data if isinstance(data, JoinedData) else list(data)
        self._logprobs, self._output = logprobs, output
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
        data = self._data.data if isinstance(self._data, JoinedData) else self._data
        if needs:
            at: dict[str, Any] = at_temperature(self._temperature)
            if not set(REFERENCE_INPUTS).isdisjoint(needs):
                at["reference_of"] = reads_reference(self._after[1], self._data)
            opened = client.open_pass(data, needs, keep_graph=False, **at)
            self._forward = lambda: (opened.logprobs, opened.given)
        else:
            future = submit_forward(client, data, config_at(self._temperature))
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
        pipeline = Pipeline.of(base, specs, self._settings, gives=given)
        return _values_of(pipeline.compute(self._data, logprobs, given=given))


def reads_reference(specs: Iterable[RegularizerSpec], data: Any) -> list[int]:
    """Indices of the data of a call for which a term reads what the base model computes."""
    indices: set[int] = set()
    for spec in specs:
        if not set(REFERENCE_INPUTS).isdisjoint(spec.needs):
            joined = isinstance(data, JoinedData)
            place = data.slice_of(spec.name) if joined else slice(None)
            indices.update(range(len(data))[place])
    return sorted(indices)


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
