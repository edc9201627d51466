"""Output of an optimizer step, from the outputs of the calls before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from steelyard.output.custom_loss import CustomLossOutput
from steelyard.output.parameter_sums import ParameterSums, weighted_name
from steelyard.output.term_outputs import BaseLossOutput, RegularizerOutput

_BASE, _TOKENS = "base", "tokens"
_ADDED = ("tokens", "_total", "_sum", "_count")  # ends of the names of metrics that are no means
_REDUCTIONS: Mapping[str, Callable[[list[float]], float]] = {
    "sum": math.fsum,
    "min": min,
    "max": max,
}


def accumulated(
    outputs: Sequence[CustomLossOutput], shares: Sequence[Mapping[str, float]]
) -> CustomLossOutput:
    """Combine the outputs of the calls of one optimizer step.

    With the share s of a term in a call, the value of the step is Σ s · value: a sum has shares
    of 1, the shares of a mean add up to 1. The calls have different log-probs, so that inner
    products of gradients add up: ‖g‖² = Σ s² ‖g_c‖², ⟨g, h⟩ = Σ s_g s_h ⟨g_c, h_c⟩. They have the
    same parameters, so that gradients with respect to these add up themselves: g = Σ s g_c.
    Metrics that the terms returned are averaged by their shares, those of the base loss by its
    `tokens`; names that end in `tokens`, `_total`, `_sum` or `_count` are added up.

    Args:
        outputs: of the calls, computed with these shares.
        shares: of each call, by name; 1 for a term without one.

    Raises:
        InputError: norms are with respect to parameters, and an output does not hold the gradients.

    Example:
        >>> calls = [CustomLossOutput(loss, BaseLossOutput(loss)) for loss in (1.0, 2.0)]
        >>> accumulated(calls, [{}, {}]).loss_total
        3.0
    """
    step = Accumulation()
    for output, of_call in zip(outputs, shares, strict=True):
        step.add(output, of_call)
    return step.output()


class Accumulation:
    """The calls of one optimizer step, as `accumulated` combines them.

    Gradients with respect to the parameters are added up as the calls come: one row for each term
    is in memory, however many calls there are.
    """

    def __init__(self) -> None:
        self._outputs: list[CustomLossOutput] = []
        self._shares: list[Mapping[str, float]] = []
        self._sums = ParameterSums()

    def add(self, output: CustomLossOutput, shares: Mapping[str, float]) -> None:
        """Add the output of a call, computed with these shares."""
        self._sums.add(output, shares)
        self._outputs.append(replace(output, parameter_gradients=None, extra_gradients={}))
        self._shares.append(shares)

    def output(self) -> CustomLossOutput:
        """Output of the step.

        Raises:
            InputError: as for `accumulated`.
        """
        outputs, shares, sums = self._outputs, self._shares, self._sums
        sums.check()
        names = dict.fromkeys(name for output in outputs for name in output.regularizers)
        regularizers = {
            name: _term(
                [
                    (output.regularizers[name], share.get(name))
                    for output, share in zip(outputs, shares, strict=True)
                    if name in output.regularizers
                ],
                sums,
            )
            for name in names
        }
        norms = [output.total_grad_norm for output in outputs if output.total_grad_norm is not None]
        return CustomLossOutput(
            loss_total=math.fsum(output.loss_total for output in outputs),
            base_loss=_base([output.base_loss for output in outputs], shares, sums),
            regularizers=regularizers,
            regularizer_total=math.fsum(output.regularizer_total for output in outputs),
            total_grad_norm=sums.total_norm(math.hypot(*norms)) if norms else None,
            term_gradients=_gradients(outputs, shares),
            cosines=_cosines(outputs, shares, sums),
            factors=_means(output.factors for output in outputs),
            skipped={
                name: reason
                for output in outputs
                for name, reason in output.skipped.items()
                if name not in regularizers
            },
            not_run=tuple(
                dict.fromkeys(
                    name
                    for output in outputs
                    for name in output.not_run
                    if name not in regularizers
                )
            ),
            loss_fn_output_type=outputs[-1].loss_fn_output_type,
            server_metrics=_server_metrics([output.server_metrics for output in outputs]),
            grad_space=outputs[-1].grad_space,
            passes=outputs[-1].passes,
        )


def _base(
    calls: Sequence[BaseLossOutput], shares: Sequence[Mapping[str, float]], sums: ParameterSums
) -> BaseLossOutput:
    own = [share.get(_BASE, 1.0) for share in shares]
    tokens = [call.custom.get(_TOKENS) for call in calls]
    counts = [count for count in tokens if count is not None]
    custom = _means((call.custom for call in calls), counts if len(counts) == len(calls) else own)
    value = math.fsum(s * call.value for s, call in zip(own, calls, strict=True))
    norms = [s * call.grad_norm for s, call in zip(own, calls, strict=True) if call.grad_norm]
    tracked = any(call.grad_norm is not None for call in calls)
    return BaseLossOutput(value, _norm(_BASE, norms, sums) if tracked else None, custom)


def _term(
    calls: Sequence[tuple[RegularizerOutput, float | None]], sums: ParameterSums
) -> RegularizerOutput:
    """Output of a term over the calls in which it ran, each with its share; None for a sum."""
    outputs = [output for output, _ in calls]
    own = [1.0 if share is None else share for _, share in calls]
    # 0 if it ran in calls without a token that counts alone, and was skipped in the others.
    total = math.fsum(own) or 1.0
    # A mean over the calls in which it ran, if it was skipped in others.
    scale = 1.0 if calls[0][1] is None else total
    value = math.fsum(s * call.value for s, call in zip(own, outputs, strict=True)) / scale
    weight = math.fsum(output.weight for output in outputs) / total
    norms = [s * o.grad_norm for s, o in zip(own, outputs, strict=True) if o.grad_norm is not None]
    weighted = [o.grad_norm_weighted for o in outputs if o.grad_norm_weighted is not None]
    last = outputs[-1]
    if _changes_space(outputs):
        norms, weighted = [], []
    norm = _norm(last.name, norms, sums) if norms else None
    norm_weighted = None
    if weighted:
        norm_weighted = _norm(weighted_name(last.name), weighted, sums)
    if norm is not None and sums.has(last.name) and last.bound is None:
        norm_weighted = weight * norm
    return RegularizerOutput(
        name=last.name,
        value=value,
        weight=weight,
        contribution=math.fsum(output.contribution for output in outputs),
        grad_norm=norm,
        grad_norm_weighted=norm_weighted,
        custom=_means((output.custom for output in outputs), own),
        duration=math.fsum(output.duration for output in outputs),
        grad_space=last.grad_space,
        bound=last.bound,
        violation=_violation(outputs, value),
    )


def _changes_space(calls: Sequence[RegularizerOutput]) -> bool:
    """Whether the norms of a term are with respect to one thing here, another there."""
    return len({call.grad_space for call in calls if call.grad_norm is not None}) > 1


def _norm(name: str, calls: Sequence[float], sums: ParameterSums) -> float:
    """Norm over the step, from those of its calls."""
    size = math.hypot(*calls)
    return math.sqrt(sums.product(name, name, size * size)) if sums.has(name) else size


def _violation(calls: Sequence[RegularizerOutput], value: float) -> float | None:
    bound = calls[-1].bound
    if bound is None:
        return None
    # The side of the bound on which a call is; if none is, then no mean of them is either.
    sides = [math.copysign(1, call.value - bound) for call in calls if call.violation]
    return max(0.0, sides[0] * (value - bound)) if sides else 0.0


def _cosines(
    outputs: Sequence[CustomLossOutput], shares: Sequence[Mapping[str, float]], sums: ParameterSums
) -> dict[tuple[str, str], float]:
    norms = [
        {name: share.get(name, 1.0) * norm for name, norm in _norms(output).items()}
        for output, share in zip(outputs, shares, strict=True)
    ]
    pairs = {
        pair: None
        for output in outputs
        for pair in output.cosines
        if not any(
            _changes_space([o.regularizers[name] for o in outputs if name in o.regularizers])
            for name in pair
        )
    }
    of_step = {
        name: _norm(name, [n.get(name, 0.0) for n in norms], sums)
        for name in dict.fromkeys(name for pair in pairs for name in pair)
    }
    cosines = {}
    for a, b in pairs:
        of_calls = math.fsum(
            output.cosines[a, b] * of_call[a] * of_call[b]
            for output, of_call in zip(outputs, norms, strict=True)
            if (a, b) in output.cosines
        )
        size = of_step[a] * of_step[b]
        product = sums.product(a, b, of_calls)
        cosines[a, b] = max(-1.0, min(1.0, product / size)) if size else 0.0
    return cosines


def _norms(output: CustomLossOutput) -> dict[str, float]:
    found = {_BASE: output.base_loss.grad_norm} | {
        name: term.grad_norm for name, term in output.regularizers.items()
    }
    return {name: norm for name, norm in found.items() if norm is not None}


def _gradients(
    outputs: Sequence[CustomLossOutput], shares: Sequence[Mapping[str, float]]
) -> dict[str, Any] | None:
    """Gradients of each term, datum by datum; None unless all calls have them."""
    found = [output.term_gradients for output in outputs if output.term_gradients is not None]
    if len(found) < len(outputs):
        return None
    names = [name for name in found[0] if all(name in of_call for of_call in found)]
    return {
        name: [
            share.get(name, 1.0) * gradient
            for of_call, share in zip(found, shares, strict=True)
            for gradient in of_call[name]
        ]
        for name in names
    }


def _means(
    calls: Iterable[Mapping[str, float]], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Mean, or sum, of each metric over the calls that have it."""
    found = list(calls)
    weighted = list(zip(found, weights or [1.0] * len(found), strict=True))
    means = {}
    for key in dict.fromkeys(key for call in found for key in call):
        mine = [(call[key], weight) for call, weight in weighted if key in call]
        if key.endswith(_ADDED):
            means[key] = math.fsum(value for value, _ in mine)
            continue
        total = math.fsum(weight for _, weight in mine)
        weighted_sum = math.fsum(value * weight for value, weight in mine)
        means[key] = weighted_sum / total if total else mine[-1][0]
    return means


def _server_metrics(calls: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a server, whose names end with how they are combined, as `loss:sum`."""
    means = _means(calls)
    for key in means:
        reduction = _REDUCTIONS.get(key.rpartition(":")[2])
        if reduction is not None:
            means[key] = reduction([call[key] for call in calls if key in call])
    return means
