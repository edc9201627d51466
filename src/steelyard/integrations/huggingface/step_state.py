"""Move the state of terms once per optimizer step, not once per micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.composition import CompositeLoss, mean_state


class StepState:
    """State of the terms of a composite over the micro-batches of an optimizer step.

    A term with state, such as `Adaptive`, updates it at each call. Under gradient accumulation each
    micro-batch therefore begins with the state from the beginning of the step, and the state after
    the step is the mean of theirs: for `Adaptive` and `EMADrift` the update by the mean value. A
    micro-batch in which a term had nothing to measure is not among them.

    Args:
        composite: the loss.
    """

    def __init__(self, composite: CompositeLoss) -> None:
        self._composite = composite
        self._before: Mapping[str, Any] | None = None
        self._after: list[tuple[float, Mapping[str, Any]]] = []

    def begin_micro_batch(self) -> None:
        """Restore the state from the beginning of the step; the first micro-batch records it."""
        if self._before is None:
            self._before = self._terms()
        elif self._before:
            self._set(self._before)

    def end_micro_batch(self) -> None:
        """Record the state after a micro-batch."""
        if self._before:
            unmeasured = {r.term.name for r in self._composite.results if not r.measured}
            states = self._terms().items()
            after = {name: None if name in unmeasured else state for name, state in states}
            self._after.append((1.0, after))

    def end_step(self) -> None:
        """Set the mean of the states after the micro-batches."""
        before = self._before or {}
        if len(self._after) > 1:
            means: Mapping[str, Any] = mean_state(self._after)
            self._set({k: before[k] if state is None else state for k, state in means.items()})
        self._before, self._after = None, []

    def _terms(self) -> Mapping[str, Any]:
        terms: Mapping[str, Any] = self._composite.get_extra_state()["terms"]
        return terms

    def _set(self, terms: Mapping[str, Any]) -> None:
        self._composite.set_extra_state({"step": self._composite.step, "terms": terms})
