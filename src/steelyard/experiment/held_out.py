"""Evaluate the base loss and every term on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from tinker import types
from torch import Tensor

from steelyard.composition import Pipeline
from steelyard.errors import TermError
from steelyard.experiment.backend import Backend
from steelyard.experiment.base_losses import CrossEntropy
from steelyard.experiment.build_terms import Terms
from steelyard.gradients import as_tensor, loss_fn_input
from steelyard.output import CustomLossOutput
from steelyard.spec import RegularizerSpec, describe, measurement

_VALUE, _FAILED, _REASON = "held_out/regularizers/", "held_out/skipped/", "/reason"
AddLine: TypeAlias = Callable[[str, int | None, int], str]
# Needed inputs of the size of the model. The others grow with the number of tokens.
_PER_MODEL = {"parameters"}


def evaluate_held_out(
    backend: Backend,
    data: Sequence[types.Datum],
    terms: Terms,
    timeout: float,
    *,
    batch: int = 16,
    add_line: AddLine = lambda text, *_: text,
) -> dict[str, Any]:
    """Metrics `held_out/loss`, and `held_out/regularizers/<name>` for each term, enabled or not.

    A value is the quantity itself, without weight and multiplier; each term is evaluated once and
    not differentiated, and its state in training does not change. Cross-entropy is averaged per
    weighted token, whatever its reduction in training. Without data, there are no metrics.

    A term that has nothing to measure in these data has no value. Neither has one that fails, but
    `held_out/skipped/<name>`, 1.0, and a `/reason`.

    Args:
        backend: gives the log-probs, and the extra inputs that terms need.
        data: held-out data.
        terms: base loss and regularizers.
        timeout: seconds that each term may take.
        batch: number of data for which logits, projections and hidden states are held in memory
            at once. The value of a term that needs them is the mean over such batches, weighted
            by the number of tokens that count.
        add_line: as that of a `TrainingBatch` of the data; for reasons and errors.

    Raises:
        TermError: the base loss fails.
    """
    if not data:
        return {}
    found = _Values(_for_data(terms.specs, data, backend), timeout, add_line)
    loss = _evaluate(backend, data, _per_token(terms.loss), found, batch)
    return {"held_out/loss": loss, **found.metrics}


def evaluate_terms(
    backend: Backend,
    data: Sequence[types.Datum],
    specs: Sequence[RegularizerSpec],
    timeout: float,
    *,
    batch: int = 16,
    add_line: AddLine = lambda text, *_: text,
) -> dict[str, Any]:
    """Metrics of `evaluate_held_out` without `held_out/loss`: the values of the terms."""
    found = _Values(_for_data(specs, data, backend), timeout, add_line)
    _evaluate(backend, data, _NoLoss(), found, batch)
    return found.metrics


def failures(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Reason for each term without a value, by name, from the metrics of an evaluation."""
    return {
        key.removeprefix(_FAILED).removesuffix(_REASON): reason
        for key, reason in metrics.items()
        if key.startswith(_FAILED) and isinstance(reason, str)
    }


@dataclass
class _Values:
    """Values of the terms in one evaluation.

    Attributes:
        specs: of all terms.
        timeout: seconds that each term may take.
        add_line: adds the line of the datum at fault to a message.
        measured: values and numbers of tokens of the calls of each term, by name.
        failed: reasons, by name.
    """

    specs: Sequence[RegularizerSpec]
    timeout: float
    add_line: AddLine
    measured: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def compute(
        self,
        loss: Any,
        specs: Sequence[RegularizerSpec],
        data: Sequence[types.Datum],
        logprobs: list[Tensor],
        given: Mapping[str, Any],
        *,
        start: int = 0,
    ) -> CustomLossOutput:
        """Evaluate a loss and terms on data, the first of which is `start`; record the values."""
        built = [spec for each in specs if (spec := self._evaluation_spec(each)) is not None]
        pipeline = Pipeline(loss, built, timeout=self.timeout, gives=given)
        try:
            output = pipeline.compute(list(data), logprobs, given=given)
        except TermError as error:
            error.args = (self.add_line(str(error), error.datum, start),)
            raise
        tokens = _count_tokens(data, logprobs)
        for name, result in output.regularizers.items():
            self.measured.setdefault(name, []).append((result.value, tokens))
        for name, reason in output.skipped.items():
            self.failed[name] = self.add_line(reason, output.failed_at.get(name), start)
        return output

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the terms, in their order."""
        metrics: dict[str, Any] = {}
        for name in (spec.name for spec in self.specs):
            if name in self.failed:
                metrics[f"{_FAILED}{name}"] = 1.0
                metrics[f"{_FAILED}{name}{_REASON}"] = self.failed[name]
            elif name in self.measured:
                metrics[f"{_VALUE}{name}"] = _mean(self.measured[name])
        return metrics

    def _evaluation_spec(self, spec: RegularizerSpec) -> RegularizerSpec | None:
        """Spec that measures the term; None if that cannot be built, or has failed before."""
        if spec.name in self.failed:
            return None
        try:
            return spec.measuring()
        except Exception as error:  # noqa: BLE001 - copying a term with state calls anybody's code
            self.failed[spec.name] = describe(error)
            return None


def _evaluate(
    backend: Backend, data: Sequence[types.Datum], loss: Any, found: _Values, batch: int
) -> float:
    """Evaluate the terms and the loss; return the loss."""
    logprobs, parameters = _evaluate_batches(backend, data, found, batch)
    whole = [spec for spec in found.specs if not _reads_batches(spec)]
    return found.compute(loss, whole, data, logprobs, parameters).base_loss.value


def _for_data(
    specs: Sequence[RegularizerSpec], data: Sequence[types.Datum], backend: Backend
) -> list[RegularizerSpec]:
    """The specs with the extra inputs that their terms read with these data."""
    return [spec.for_data(data, backend.gives) for spec in specs]


class _NoLoss:
    """Base loss of a pipeline that only evaluates terms."""

    gradient = "none"

    def compute(self, data: object, logprobs: object) -> float:  # noqa: ARG002 - reads nothing
        return 0.0


def _evaluate_batches(
    backend: Backend, data: Sequence[types.Datum], found: _Values, batch: int
) -> tuple[list[Tensor], dict[str, Any]]:
    """Evaluate the terms that read large inputs, batch by batch.

    Returns:
        The log-probs of all data, and the parameters of the model if a term needs them.
    """
    needs = tuple(dict.fromkeys(need for spec in found.specs for need in spec.needs))
    if not needs:
        return backend.logprobs(data), {}
    specs = [spec for spec in found.specs if _reads_batches(spec)]
    logprobs: list[Tensor] = []
    given: dict[str, Any] = {}
    for part, forward in backend.forward(data, needs, batch):
        given = forward.given
        if specs:
            found.compute(_NoLoss(), specs, part, forward.logprobs, given, start=len(logprobs))
        logprobs += forward.logprobs
    return logprobs, {need: given[need] for need in needs if need in _PER_MODEL}


def _reads_batches(spec: RegularizerSpec) -> bool:
    return not _PER_MODEL.issuperset(spec.needs)


def _count_tokens(data: Sequence[types.Datum], logprobs: Sequence[Tensor]) -> int:
    """Number of tokens whose weight is not 0; all count in a datum without weights."""
    weights = (loss_fn_input(datum, "weights") for datum in data)
    return sum(
        len(row) if given is None else int((as_tensor(given) != 0).sum())
        for row, given in zip(logprobs, weights, strict=True)
    )


def _mean(measured: Sequence[tuple[float, int]]) -> float:
    """Mean weighted by tokens; the value itself if there is one."""
    if len(measured) == 1:
        return measured[0][0]
    tokens = sum(count for _, count in measured)
    return math.fsum(value * count for value, count in measured) / max(tokens, 1)


def _per_token(loss: Any) -> Any:
    return CrossEntropy(reduction="mean") if isinstance(loss, CrossEntropy) else measurement(loss)
