"""Evaluate the base loss and every term on held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tinker import types
from torch import Tensor

from steelyard.composition.pipeline import Pipeline
from steelyard.errors import TermError
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.training.base_losses import CrossEntropy
from steelyard.experiment.training.terms import Terms
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.error_messages import describe
from steelyard.spec.protocol import measurement
from steelyard.spec.regularizer import RegularizerSpec

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
    with_loss: bool = True,
    batch: int = 16,
    add_line: AddLine = lambda text, *_: text,
) -> dict[str, Any]:
    """Metrics `held_out/loss`, and `held_out/regularizers/<name>` for each term, enabled or not.

    A value is the quantity itself, without weight and multiplier; each term is evaluated once and
    not differentiated, and its state in training does not change. Cross-entropy is averaged per
    weighted token, whatever its reduction in training. Without data, there are no metrics. A term
    with data of its own is measured on the held-out part of these.

    A term that has nothing to measure in these data has no value. Neither has one that fails, but
    `held_out/skipped/<name>`, 1.0, and a `/reason`.

    Args:
        backend: gives the log-probs, and the extra inputs that terms need.
        data: held-out data.
        terms: base loss and regularizers.
        timeout: seconds that each term may take.
        with_loss: evaluate the base loss too.
        batch: number of data for which logits, projections and hidden states are held in memory
            at once. The value of a term that needs them is the mean over such batches, weighted
            by the number of tokens that count.
        add_line: as that of a `TrainingBatch` of the data; for reasons and errors.

    Raises:
        TermError: the base loss fails.
    """
    metrics: dict[str, Any] = {}
    values: list[_Values] = []
    if data:
        specs = [spec for spec in terms.specs if spec.name not in terms.with_own_data]
        loss = _per_token(terms.loss) if with_loss else _NoLoss()
        measured, value = _measure(backend, data, specs, loss, timeout, batch, add_line)
        metrics = {"held_out/loss": value} if with_loss else {}
        values.append(measured)
    for name, own in terms.data.items():
        if own.held_out:
            specs = [spec for spec in terms.specs if spec.name == name]
            size = specs[0].per_step * len(own.train[0])  # as in a training step
            lines = own.batch(own.held_out)
            measured, _ = _measure(
                backend, own.held_out, specs, _NoLoss(), timeout, size, lines.add_line
            )
            values.append(measured)
    by_term = {name: of for part in values for name, of in part.metrics.items()}
    for spec in terms.specs:
        metrics |= by_term.get(spec.name, {})
    return metrics


def _measure(
    backend: Backend,
    data: Sequence[types.Datum],
    specs: Sequence[RegularizerSpec],
    loss: Any,
    timeout: float,
    batch: int,
    add_line: AddLine,
) -> tuple[_Values, float]:
    """Values of terms on the data that they read, and that of a loss."""
    values = _Values([spec.for_data(data, backend.gives) for spec in specs], timeout, add_line)
    logprobs, parameters = _evaluate_batches(backend, data, values, batch)
    whole = [spec for spec in values.specs if not _reads_batches(spec)]
    output = values.compute(loss, whole, data, logprobs, parameters)
    return values, output.base_loss.value


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
        extra_inputs: Mapping[str, Any],
        *,
        start: int = 0,
    ) -> CustomLossOutput:
        """Evaluate a loss and terms on data, the first of which is `start`; record the values."""
        built = [spec for term in specs if (spec := self._evaluation_spec(term)) is not None]
        pipeline = Pipeline(loss, built, timeout=self.timeout, gives=extra_inputs)
        try:
            output = pipeline.compute(list(data), logprobs, given=extra_inputs)
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
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Metrics of each term, by its name; none of one that has nothing to measure."""
        values = {name: {f"{_VALUE}{name}": _mean(of)} for name, of in self.measured.items()}
        reasons = {
            name: {f"{_FAILED}{name}": 1.0, f"{_FAILED}{name}{_REASON}": reason}
            for name, reason in self.failed.items()
        }
        return {**values, **reasons}

    def _evaluation_spec(self, spec: RegularizerSpec) -> RegularizerSpec | None:
        """Spec that measures the term; None if that cannot be built, or has failed before."""
        if spec.name in self.failed:
            return None
        try:
            # The data are those of the call.
            return replace(spec.measuring(), data=None)
        except Exception as error:  # noqa: BLE001 - copying a term with state calls anybody's code
            self.failed[spec.name] = describe(error)
            return None


class _NoLoss:
    """Base loss of a pipeline that only evaluates terms."""

    gradient = "none"

    def compute(self, data: object, logprobs: object) -> float:  # noqa: ARG002 - reads nothing
        return 0.0


def _evaluate_batches(
    backend: Backend, data: Sequence[types.Datum], values: _Values, batch: int
) -> tuple[list[Tensor], dict[str, Any]]:
    """Evaluate the terms that read large inputs, batch by batch.

    Returns:
        The log-probs of all data, and the parameters of the model if a term needs them.
    """
    needs = tuple(dict.fromkeys(need for spec in values.specs for need in spec.needs))
    if not needs:
        return backend.logprobs(data), {}
    specs = [spec for spec in values.specs if _reads_batches(spec)]
    logprobs: list[Tensor] = []
    extra_inputs: dict[str, Any] = {}
    for part, forward in backend.forward(data, needs, batch):
        extra_inputs = forward.given
        if specs:
            values.compute(
                _NoLoss(), specs, part, forward.logprobs, extra_inputs, start=len(logprobs)
            )
        logprobs += forward.logprobs
    return logprobs, {need: extra_inputs[need] for need in needs if need in _PER_MODEL}


def _reads_batches(spec: RegularizerSpec) -> bool:
    return not _PER_MODEL.issuperset(spec.needs)


def _count_tokens(data: Sequence[types.Datum], logprobs: Sequence[Tensor]) -> int:
    """Number of tokens whose weight is not 0; all count in a datum without weights."""
    weights = (loss_fn_input(datum, "weights") for datum in data)
    return sum(
        len(row) if row_weights is None else int((as_tensor(row_weights) != 0).sum())
        for row, row_weights in zip(logprobs, weights, strict=True)
    )


def _mean(measured: Sequence[tuple[float, int]]) -> float:
    """Mean weighted by tokens; the value itself if there is one."""
    if len(measured) == 1:
        return measured[0][0]
    tokens = sum(count for _, count in measured)
    return math.fsum(value * count for value, count in measured) / max(tokens, 1)


def _per_token(loss: Any) -> Any:
    return CrossEntropy(reduction="mean") if isinstance(loss, CrossEntropy) else measurement(loss)
