"""Aggregation of the terms' values and gradients into one loss and one gradient.

With rows gᵢ (the gradient of term i), weights wᵢ (1 for the base loss) and factors aᵢ of the
aggregator, the total gradient is Σ aᵢ wᵢ gᵢ. Norms and cosines come from the Gram matrix
Gᵢⱼ = ⟨gᵢ, gⱼ⟩ of the rows of one space, so no further backward pass is needed.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from steelyard.composition.bounds import size_of_base
from steelyard.composition.ranks import Ranks
from steelyard.composition.terms import TermResult
from steelyard.errors import AggregationError, SpecError
from steelyard.gradients.algebra import Row, gram, norm_of, norms_and_cosines, weighted_sum
from steelyard.gradients.parse_result import split_metrics
from steelyard.output.custom_loss import BaseLossOutput, CustomLossOutput, RegularizerOutput
from steelyard.spec.error_messages import BASE, title
from steelyard.spec.protocol import Stateful

# Inner products of gradients, by the names of two terms.
Products: TypeAlias = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class ComparedGradients:
    """Gradients that several processes have compared, the same on all of them.

    Attributes:
        products: inner products of the terms' gradients on the whole batch.
        share: factor on the regularizers, the mean share of the processes.
        values: of the terms on the whole batch, by name; None: each process has its own.
    """

    products: Products
    share: float
    values: Mapping[str, float] | None = None


class AggregationWarning(UserWarning):
    """An aggregator found no factors for a step, which took the plain sum."""


class Aggregator(ABC):
    """Rule for the factor of each term's weighted gradient in the total gradient.

    The total gradient is Σ factorᵢ · weightᵢ · gradientᵢ, the base loss with weight 1.

    Attributes:
        reads_gram: whether the factors depend on the Gram matrix. Then the terms are
            differentiated one by one at every step.
        in_float64: whether the Gram matrix is summed in float64, which takes longer. In float32
            it has an error of 1e-7 of its diagonal: too much to invert that of dependent gradients.
    """

    reads_gram = True
    in_float64 = False

    @property
    def by_row(self) -> bool:
        """Whether it has a number for each row, which is the factor of a row that is alone."""
        return False

    @property
    def stateful(self) -> Stateful | None:
        """Object that keeps state from step to step: the aggregator, if it has a `state_dict`."""
        return self if isinstance(self, Stateful) else None

    @abstractmethod
    def factors(
        self, values: Sequence[float], weights: Sequence[float], products: Sequence[Sequence[float]]
    ) -> Sequence[float]:
        """Compute the factor of each term.

        Args:
            values: of the terms, the base loss first.
            weights: of the terms.
            products: the Gram matrix of their weighted gradients, of finite numbers; empty unless
                `reads_gram`.

        Raises:
            AggregationError: there are none; the step then takes the plain sum, with a warning.
        """

    def factors_of(
        self,
        rows: Sequence[str],  # noqa: ARG002 - for those that have a number for each row
        declared: Sequence[str],  # noqa: ARG002
        values: Sequence[float],
        weights: Sequence[float],
        products: Sequence[Sequence[float]],
    ) -> Sequence[float]:
        """As `factors`, with the names of the terms.

        Args:
            rows: names of the terms of this step, in order.
            declared: names of all terms that may have a row, in order; some have none at a step
                where they are disabled, not due, skipped, or have the weight 0.
            values: of the terms of this step.
            weights: of these terms.
            products: the Gram matrix of their weighted gradients.
        """
        return self.factors(values, weights, products)


class WeightedSum(Aggregator):
    """The gradient of the weighted sum: every factor is 1."""

    reads_gram = False

    def factors(
        self,
        values: Sequence[float],
        weights: Sequence[float],  # noqa: ARG002 - it decides nothing
        products: Sequence[Sequence[float]],  # noqa: ARG002
    ) -> Sequence[float]:
        """One for each term."""
        return [1.0] * len(values)


@dataclass(frozen=True)
class Combined:
    """Combined gradients of the terms of a call.

    Attributes:
        totals: Σ factor · weight · gradient, one row per space.
        total_norm: the L2 norm of the total in the main space.
        norms: the norm of each term's gradient in its space; empty unless tracked.
        cosines: of each pair of terms of one space; of its negative for a term with a lower bound.
        factors: by name; empty for the plain sum.
    """

    totals: Mapping[str, Row] = field(default_factory=dict)
    total_norm: float | None = None
    norms: Mapping[str, float] = field(default_factory=dict)
    cosines: Mapping[tuple[str, str], float] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)


def combine(
    results: Sequence[TermResult],
    aggregator: Aggregator,
    main: str,
    *,
    tracked: bool,
    step: int = 0,
    share: float = 1.0,
    known: ComparedGradients | None = None,
    declared: Sequence[str] = (),
) -> Combined:
    """Combine the gradients of the terms.

    Args:
        results: of the terms that ran.
        aggregator: decides the factors.
        main: the space of `total_norm` and of the Gram matrix that the aggregator sees.
        tracked: whether norms and cosines are wanted.
        step: number of the step, for warnings.
        share: factor on the weights of the regularizers in the Gram matrix that the aggregator
            sees, unless `known` has it; the totals and norms are without it.
        known: the comparison of all gradients, if several processes have made it; the gradients
            then have no tensors, and the totals none either.
        declared: names of all terms that may have a row, for the aggregator; empty: of `results`.

    Raises:
        SpecError: the aggregator would have to compare gradients of different spaces.
    """
    done = [result for result in results if result.gradients]
    norms: dict[str, float] = {}
    cosines: dict[tuple[str, str], float] = {}
    products: Sequence[Sequence[float]] = ()
    if tracked or aggregator.reads_gram:
        norms, cosines, products = _compare(done, aggregator, main, known)
    factors: dict[str, float] = {}
    if aggregator.reads_gram:
        share = share if known is None else known.share
        values = None if known is None else known.values
        names = declared or [r.term.name for r in results if not r.term.spec.anchor]
        factors = _factors(done, aggregator, main, products, values, names, step=step, share=share)
    weights = {r.term.name: factors.get(r.term.name, 1.0) * float(r.weight) for r in done}
    totals: dict[str, Row] = {}
    for key in dict.fromkeys(key for result in done for key in result.gradients):
        mine = [result for result in done if key in result.gradients]
        of_key = [result.gradients[key] for result in mine]
        totals[key] = weighted_sum([weights[result.term.name] for result in mine], of_key)
    total_norm = None
    if main in totals:
        # The gradient of the whole batch is on no single process: its norm is that of the sum.
        total_norm = (
            norm_of(totals[main]) if known is None else _norm_of_sum(weights, known.products)
        )
    # Fused terms have no gradients of their own, but the gradient of their weighted sum, and norms
    # and cosines from the kernel. Terms are fused for the plain sum alone, so no factors apply.
    for group in dict.fromkeys(r.group for r in results if r.group is not None):
        joint = group.joint
        for key, row in group.gradients.items():
            totals[key] = _added(totals.get(key), row)
        norms |= zip(group.names, joint.norms, strict=False)
        cosines |= {(group.names[i], group.names[j]): c for (i, j), c in joint.cosines.items()}
        total_norm = joint.total_norm if joint.total_norm is not None else total_norm
    if not tracked:
        norms, cosines = {}, {}
    return Combined(totals, total_norm, norms, cosines, factors)


def _compare(
    done: Sequence[TermResult], aggregator: Aggregator, main: str, known: ComparedGradients | None
) -> tuple[dict[str, float], dict[tuple[str, str], float], Sequence[Sequence[float]]]:
    """Norms and cosines of the terms of each space, and the Gram matrix of the main space.

    Gradients of different spaces have no inner product: each space has a Gram matrix of its own.
    """
    norms: dict[str, float] = {}
    cosines: dict[tuple[str, str], float] = {}
    of_main: Sequence[Sequence[float]] = ()
    for compared in dict.fromkeys(result.compared_with for result in done):
        space, owner = compared
        mine = [r for r in done if r.compared_with == compared and r.gradients.keys() >= set(space)]
        names = [r.term.name for r in mine]
        if known is None:
            rows = [[gradient for key in space for gradient in r.gradients[key]] for r in mine]
            products = gram(rows, in_float64=aggregator.in_float64)
        else:  # the processes have summed the products: the rows here are without tensors
            products = [[known.products[a, b] for b in names] for a in names]
        if space == (main,) and not owner:
            of_main = products
        norms_here, cosines_here = norms_and_cosines(names, products)
        norms |= norms_here
        # A term with a lower bound is subtracted: its gradient in the loss is minus its own.
        lower = {r.term.name for r in mine if r.bound is not None and not r.bound.upper}
        cosines |= {
            (a, b): -cosine if (a in lower) != (b in lower) else cosine
            for (a, b), cosine in cosines_here.items()
        }
    return norms, cosines, of_main


def _norm_of_sum(weights: Mapping[str, float], products: Products) -> float:
    """‖Σ wᵢ gᵢ‖ = √Σ wᵢ wⱼ Gᵢⱼ."""
    squares = [a * b * products[i, j] for i, a in weights.items() for j, b in weights.items()]
    return math.sqrt(max(0.0, math.fsum(squares)))


def set_multipliers(
    results: Sequence[TermResult],
    step: int,
    gradient_size: Callable[[TermResult], float],
    shares: Mapping[str, float],
    ranks: Ranks | None = None,
    part: float | Tensor = 1.0,
) -> None:
    """Set the weights of the bounded terms, from the values of this call.

    Args:
        results: of all terms, the base loss first.
        step: number of the optimizer step.
        gradient_size: Σ |∂ loss / ∂ input| of the base loss.
        shares: factors on the weights in this call, by name.
        ranks: the processes whose mean values decide; None: the values of this one. A term that
            has no value here follows the others' values, so that all have the same state.
        part: of the base loss of the whole step that the base loss of this call is already.
    """
    ran = [result for result in results if result.ran]
    numbers = dict(zip([result.term.name for result in ran], read_numbers(ran), strict=True))
    bounded = [result for result in results if result.term.is_bounded]
    for result in bounded:
        result.term.statistics.multiplier.begin_step(step)
    needs_size = any(result.term.statistics.multiplier.needs_size for result in bounded)
    base, slope = numbers[BASE], gradient_size(results[0]) if needs_size else 0.0
    part = float(part) if needs_size else 1.0
    values = [numbers.get(result.term.name) for result in bounded]
    if ranks is not None:
        # The mean of the slopes too: with the loss Σᵣ lossᵣ / R an input of rank r has 1/R of it.
        values, (base, slope, part) = ranks.means(values, (base, slope, part))
    size = size_of_base(base, slope)
    for result, value in zip(bounded, values, strict=True):
        bound = result.term.spec.bound_at(step)
        if value is None or bound is None:  # bound: for mypy, it is there
            continue
        multiplier = result.term.statistics.multiplier
        share = shares.get(result.term.name, 1.0)
        # The size of the base loss of the whole step, of which this call has a share: in the sum
        # over its calls, the multiplier is then that of one large call.
        of_step = size * float(results[0].weight) / ((part * share) or 1.0)
        weight = multiplier.weight(bound, value, of_step if multiplier.needs_size else None)
        result.weight, result.bound = bound.sign * weight * share, bound


def _factors(
    done: Sequence[TermResult],
    aggregator: Aggregator,
    main: str,
    products: Sequence[Sequence[float]],
    values: Mapping[str, float] | None,
    declared: Sequence[str],
    *,
    step: int,
    share: float,
) -> dict[str, float]:
    """Factors of the terms, 1 for those that the aggregator does not see; empty for the plain sum.

    Args:
        done: results with a gradient.
        aggregator: one that reads the Gram matrix.
        main: the space of the Gram matrix.
        products: the Gram matrix of the gradients, before the weights.
        values: of the terms, by name; None takes them from `done`.
        declared: names of all terms that may have a row.
        step: number of the step, for the warning.
        share: factor on the weights of the regularizers.
    """
    weight_of = {
        r.term.name: float(r.weight) * (1.0 if r.term.is_base else share)
        for r in done
        if not r.term.spec.anchor
    }
    # A term of weight 0 is switched off: to MGDA, for one, its row of zeros would be the optimum.
    seen = [r for r in done if weight_of.get(r.term.name, 0.0) != 0]
    for result in seen:
        if result.compared_with != ((main,), ""):
            of_its_own = " of its own data" if result.compared_with[1] else ""
            raise SpecError(
                f"an aggregator compares gradients with respect to the same tensors, here "
                f"{main}, and the gradient of {title(result.term.name)} is with respect to "
                f"{' and '.join(result.space)}{of_its_own}: give it anchor=True, which exempts it, "
                f"compare them with grad_space='parameters', or use aggregate='sum'."
            )
    in_main = [r for r in done if r.compared_with == ((main,), "")]
    rows = [i for i, r in enumerate(in_main) if r in seen]
    # One gradient has none to be compared with.
    if len(rows) < (1 if aggregator.by_row else 2):
        return {}
    if not all(math.isfinite(products[i][i]) for i in rows):
        return {}  # the total is not finite either, and the caller looks for the term at fault
    names = [r.term.name for r in seen]
    weights = [weight_of[name] for name in names]
    weighted = [
        [a * b * products[i][j] for b, j in zip(weights, rows, strict=True)]
        for a, i in zip(weights, rows, strict=True)
    ]
    try:
        numbers = read_numbers(seen) if values is None else [values[name] for name in names]
        factors = aggregator.factors_of(names, declared, numbers, weights, weighted)
    except AggregationError as error:
        warnings.warn(
            f"step {step} takes the plain sum of the gradients: {error}",
            AggregationWarning,
            stacklevel=2,
        )
        return {}
    ones = {result.term.name: 1.0 for result in done}
    return ones | dict(zip(names, factors, strict=True))


def _added(a: Row | None, b: Row) -> Row:
    if a is None:
        return b
    return [y if x is None else x if y is None else x + y for x, y in zip(a, b, strict=True)]


def read_numbers(results: Sequence[TermResult]) -> list[float]:
    """Values as floats; those on a device are read in one transfer, and stored."""
    unread = [(r, r.value) for r in results if r.number is None and r.value is not None]
    if unread:
        for (result, _), number in zip(unread, _as_floats([v for _, v in unread]), strict=True):
            result.number = number
    return [0.0 if r.number is None else r.number for r in results]


def _as_floats(numbers: Sequence[float | Tensor]) -> list[float]:
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    device = next((t.device for t in tensors if not t.is_cpu), None)
    if device is None:
        return [n.item() if isinstance(n, Tensor) else n for n in numbers]
    floats: list[float] = torch.stack([t.detach().to(device) for t in tensors]).tolist()
    return floats


def build_output(
    results: Sequence[TermResult],
    combined: Combined,
    not_run: Sequence[str],
    numbers: Mapping[str, tuple[float, float]] | None = None,
    **more: object,
) -> CustomLossOutput:
    """Build the output of a call.

    Args:
        results: of the terms that were due, the base loss first.
        combined: their gradients.
        not_run: names of the terms that were not due.
        numbers: value and weight of each term that ran, by name; None takes them from `results`.
        more: further fields of the output.
    """
    ran = [result for result in results if result.ran]
    if numbers is None:
        weights = _as_floats([result.weight for result in ran])
        pairs = zip(read_numbers(ran), weights, strict=True)
        numbers = dict(zip([result.term.name for result in ran], pairs, strict=True))
    by_name = {result.term.name: result for result in results}
    base, base_weight = BaseLossOutput(0.0), 1.0
    unmeasured = [name for name, result in by_name.items() if not result.measured]
    regularizers: dict[str, RegularizerOutput] = {}
    for name, (value, weight) in numbers.items():
        result = by_name.get(name)
        norm = combined.norms.get(name)
        custom = split_metrics(name, (None, result.custom))[1] if result and result.custom else {}
        if result is not None and result.term.is_base:
            base, base_weight = BaseLossOutput(value, norm, custom), weight
            continue
        space = result.space if result else ran[0].space
        bound = result.bound if result else None
        size = abs(weight)  # negative under a lower bound
        regularizers[name] = RegularizerOutput(
            name=name,
            value=value,
            weight=size,
            contribution=(bound.sign if bound else 1) * size * value,
            grad_norm=norm,
            grad_norm_weighted=None if norm is None else size * norm,
            custom=custom,
            duration=result.duration if result else 0.0,
            grad_space="+".join(space),
            bound=bound.value if bound else None,
            violation=max(0.0, bound.sign * (value - bound.value)) if bound else None,
        )
    added = sum(regularizer.contribution for regularizer in regularizers.values())
    return CustomLossOutput(
        loss_total=base_weight * base.value + added,
        base_loss=base,
        regularizers=regularizers,
        regularizer_total=added,
        cosines=combined.cosines,
        factors=combined.factors,
        skipped={
            name: r.skipped
            for name, r in by_name.items()
            if r.skipped is not None and name not in numbers
        },
        failed_at={
            name: r.failed_at
            for name, r in by_name.items()
            if r.failed_at is not None and name not in numbers
        },
        not_run=tuple(name for name in (*not_run, *unmeasured) if name not in numbers),
        **more,  # type: ignore[arg-type]  # fields of the output
    )
