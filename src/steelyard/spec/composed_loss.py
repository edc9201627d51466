"""`base + weight * term`: a base loss and its regularizers, written as a sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from steelyard.errors import SpecError
from steelyard.spec.numbers import is_finite
from steelyard.spec.protocol import Schedule

if TYPE_CHECKING:
    from steelyard.spec.regularizer import RegularizerSpec


@dataclass(frozen=True)
class ComposedLoss:
    """A base loss and its regularizers; accepted wherever a base loss is.

    `nll + 0.1 * kl + 0.2 * l2` builds it, with specs `kl` and `l2`.

    Attributes:
        loss_fn: the base loss.
        regularizers: the specs, in the order of the sum.

    Example:
        >>> from steelyard import RegularizerSpec
        >>> def nll(data, logprobs):
        ...     return -logprobs[0].sum()
        >>> l2 = RegularizerSpec(lambda data, logprobs: logprobs[0].square().sum(), 1.0, "l2")
        >>> total = nll + 0.1 * l2
        >>> total.loss_fn is nll, [(spec.name, spec.weight) for spec in total.regularizers]
        (True, [('l2', 0.1)])
    """

    loss_fn: Any
    regularizers: tuple[RegularizerSpec, ...]

    def __add__(self, spec: RegularizerSpec) -> ComposedLoss:
        # Not `isinstance`: the class of specs imports this module.
        if not isinstance(getattr(spec, "name", None), str) or not hasattr(spec, "weight_at"):
            return NotImplemented
        return replace(self, regularizers=(*self.regularizers, spec))


@dataclass(frozen=True)
class _Scaled:
    """A schedule times a number."""

    schedule: Schedule
    factor: float

    def __call__(self, step: Any) -> Any:
        return self.factor * self.schedule(step)


def scaled(spec: RegularizerSpec, factor: object) -> RegularizerSpec:
    """The spec with `factor` times its weight.

    Raises:
        SpecError: the spec has a bound, or the weight becomes negative or is not finite.
    """
    if not is_finite(factor):
        raise SpecError(
            f"a term must be multiplied by a finite number, got {factor!r} "
            f"(regularizer {spec.name!r})."
        )
    number = float(factor)  # type: ignore[arg-type]  # it is finite
    if spec.weight is None:
        raise SpecError(
            f"a term with a bound must not be multiplied, because it has no weight: add it as it "
            f"is, got the factor {number:g} (regularizer {spec.name!r})."
        )
    weight = _Scaled(spec.weight, number) if callable(spec.weight) else number * spec.weight
    return replace(spec, weight=weight)


def split_loss(loss_fn: Any, regularizers: Iterable[Any]) -> tuple[Any, list[Any]]:
    """The base loss itself, and the regularizers: first those of a `ComposedLoss`.

    Raises:
        SpecError: the regularizers are not in a list.
    """
    if isinstance(regularizers, Mapping) or not isinstance(regularizers, Iterable):
        raise SpecError(
            f"regularizers must be a list of specs or of mappings, got {regularizers!r}: put a "
            f"single one into a list."
        )
    if isinstance(loss_fn, ComposedLoss):
        return loss_fn.loss_fn, [*loss_fn.regularizers, *regularizers]
    return loss_fn, list(regularizers)
