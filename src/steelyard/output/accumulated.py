"""Output of an optimizer step, from the outputs of the calls before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any, TypeAlias

from steelyard.errors import InputError
from steelyard.output.custom_loss import BaseLossOutput, CustomLossOutput, RegularizerOutput

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
            data=_data(outputs),
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
    norms = {_BASE: output.base_loss.grad_norm} | {
        name: term.grad_norm for name, term in output.regularizers.items()
    }
    return {name: norm for name, norm in norms.items() if norm is not None}


def _gradients(
    outputs: Sequence[CustomLossOutput], shares: Sequence[Mapping[str, float]]
) -> dict[str, Any] | None:
    """Gradients of each term, datum by datum; None unless all calls have them."""
    gradients = [output.term_gradients for output in outputs if output.term_gradients is not None]
    if len(gradients) < len(outputs):
        return None
    names = [name for name in gradients[0] if all(name in of_call for of_call in gradients)]
    return {
        name: [
            share.get(name, 1.0) * gradient
            for of_call, share in zip(gradients, shares, strict=True)
            for gradient in of_call[name]
        ]
        for name in names
    }


def _data(outputs: Sequence[CustomLossOutput]) -> list[Any] | None:
    """Data of all calls, in the order of the gradients; None unless all calls have them."""
    calls = [output.data for output in outputs if output.data is not None]
    return [datum for data in calls for datum in data] if len(calls) == len(outputs) else None


def _means(
    calls: Iterable[Mapping[str, float]], weights: Sequence[float] | None = None
) -> dict[str, float]:
    """Mean, or sum, of each metric over the calls that have it."""
    by_call = list(calls)
    weighted = list(zip(by_call, weights or [1.0] * len(by_call), strict=True))
    means = {}
    for key in dict.fromkeys(key for call in by_call for key in call):
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


# A tensor, or None, for each parameter. This folder does not import torch.
Row: TypeAlias = Sequence[Any]
# Inputs that hold the model's parameters: those of all layers, and those of the output layer.
_OF_MODEL = frozenset({"parameters", "projection"})


class ParameterSums:
    """Sums, over the calls of a step, of the gradients of terms with respect to the parameters."""

    def __init__(self) -> None:
        self._calls = 0
        self._spaces: dict[str, str] = {}
        self._rows: dict[str, Row] = {}
        self._within: dict[tuple[str, str], float] = {}  # sums of p_c, of terms over both kinds
        self._total: Row | None = None
        self._lacking: str | None = None

    def add(self, output: CustomLossOutput, shares: Mapping[str, float]) -> None:
        """Add the gradients of a call."""
        self._calls += 1
        spaces = {name: space for name, space in _spaces(output) if _has_parameters(space)}
        known = output.parameter_gradients or {}
        self._lacking = next((name for name in spaces if name not in known), self._lacking)
        factors = {name: shares.get(name, 1.0) for name in spaces if name in known}
        rows = {name: known[name] for name in factors}
        for name in list(rows):
            term = output.regularizers.get(name)
            if term is not None and term.bound is not None:  # its weight differs from call to call
                weighted = weighted_name(name)
                rows[weighted], factors[weighted] = rows[name], term.weight
                spaces[weighted] = spaces[name]
        self._spaces |= spaces
        mixed = [name for name in rows if spaces[name] != "parameters"]
        for a, b in combinations_with_replacement(mixed, 2):
            if spaces[a] != spaces[b]:
                continue
            product = factors[a] * factors[b] * _product(rows[a], rows[b])
            self._within[a, b] = self._within.get((a, b), 0.0) + product
        for name, row in rows.items():
            self._rows[name] = _plus(self._rows.get(name), factors[name], row)
        if output.total_grad_norm is not None and output.grad_space == "parameters":
            total = list(_leaves(output.extra_gradients.get("parameters")))
            self._total = _plus(self._total, 1.0, total)

    def check(self) -> None:
        """Check that the gradients of all calls are known, unless there is only one.

        Raises:
            InputError: they are not.
        """
        if self._lacking is not None and self._calls > 1:
            raise InputError(
                f"norms over several calls with respect to parameters need the gradients of each "
                f"call, and an output has no parameter_gradients of {self._lacking!r}: pass share= "
                f"to each call, {{}} if all terms are sums, and combine the outputs before they "
                f"are pickled or written as JSON."
            )

    def has(self, name: str) -> bool:
        """Whether the gradient of a term is a sum of gradients."""
        return self._calls > 1 and name in self._rows

    def product(self, a: str, b: str, of_calls: float) -> float:
        """⟨g, h⟩ of two terms over the step.

        Args:
            a: name of a term.
            b: name of a term with a gradient in the same space.
            of_calls: Σ_c s_c t_c P_c.
        """
        if not (self.has(a) and self.has(b)):
            return of_calls
        summed = _product(self._rows[a], self._rows[b])
        if self._spaces[a] == "parameters":
            return summed
        within = self._within.get((a, b), self._within.get((b, a), 0.0))
        return max(0.0, of_calls - within) + summed if a == b else of_calls - within + summed

    def total_norm(self, of_calls: float) -> float:
        """Norm of the gradient of the loss over the step; that of the calls if they are apart."""
        total = self._total
        return of_calls if total is None or self._calls == 1 else math.sqrt(_product(total, total))


def weighted_name(name: str) -> str:
    """Name under which the contribution of a term with a bound is added up."""
    return f"{name}/weighted"


def _spaces(output: CustomLossOutput) -> Iterator[tuple[str, str]]:
    """Names of the terms with a norm, and what it is with respect to."""
    if output.base_loss.grad_norm is not None:
        yield "base", output.grad_space
    for name, term in output.regularizers.items():
        if term.grad_norm is not None:
            yield name, term.grad_space


def _has_parameters(space: str) -> bool:
    return not _OF_MODEL.isdisjoint(space.split("+"))


def _plus(total: Row | None, factor: float, row: Row) -> Row:
    scaled = [None if x is None else factor * x for x in row]
    if total is None:
        return scaled
    return [
        y if x is None else x if y is None else x + y for x, y in zip(total, scaled, strict=True)
    ]


def _product(a: Row, b: Row) -> float:
    """Inner product, in float64."""
    dots = [
        (x.double() * y.double()).sum()
        for x, y in zip(a, b, strict=True)
        if x is not None and y is not None
    ]
    return float(sum(dots))


def _leaves(nest: Any) -> Iterator[Any]:
    """Tensors and Nones of a nest, in order."""
    if isinstance(nest, Mapping):
        nest = nest.values()
    elif not isinstance(nest, list | tuple):
        yield nest
        return
    for inner in nest:
        yield from _leaves(inner)
