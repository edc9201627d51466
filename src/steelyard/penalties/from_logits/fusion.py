"""Fusion of the calls of a loss: find the calls that one kernel can compute together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array
from steelyard.penalties.from_logits import logit_terms
from steelyard.penalties.from_logits._components import (
    TERM_NAMES,
    WeightedComponents,
    can_share_kernel,
    parse_terms,
)
from steelyard.penalties.from_logits.compose import ComposedLogits, compose_logits


def _positional(fn: Callable[..., Array]) -> tuple[str, ...]:
    parameters = inspect.signature(fn).parameters.values()
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    )


# Functions whose calls can be fused, with the arrays that each takes by position.
_FUNCTIONS: Sequence[tuple[Callable[..., Array], tuple[str, ...]]] = tuple(
    (fn, _positional(fn)) for fn in (getattr(logit_terms, name) for name in TERM_NAMES)
)


@dataclass(frozen=True, eq=False)
class LogitCall:
    """A weighted call in a loss: `fn(**arrays, **options)`.

    Attributes:
        name: Name of the term.
        fn: Any function; the reducing functions of this package can be fused.
        arrays: Arrays by parameter: `logits`, and `reference`, `targets`, `mask`.
        weight: Weight of its value in the loss.
        options: Its other arguments.
    """

    name: str
    fn: Callable[..., Array]
    arrays: Mapping[str, Array]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # whatever `fn` takes

    @classmethod
    def of(
        cls,
        name: str,
        fn: Callable[..., Array],
        args: Sequence[Array],
        arrays: Mapping[str, Array],
        weight: float = 1.0,
        options: Mapping[str, Any] | None = None,
    ) -> LogitCall | None:
        """Build the call `fn(*args, **arrays, **options)`; None if it cannot be fused."""
        names = parameters_of(fn)
        if names is None or len(args) > len(names):
            return None
        named = {**arrays, **dict(zip(names, args, strict=False))}
        call = cls(name, fn, named, weight, options or {})
        return None if call.parts is None else call

    @cached_property
    def parts(self) -> WeightedComponents | None:
        """Weighted components of the call; None if it cannot be fused."""
        reduces = self.options.get("reduction", "mean") != "none"
        if parameters_of(self.fn) is None or not reduces:
            return None
        try:
            [term] = parse_terms([(self.fn.__name__, _term_options(self))], classes=2)
        except InputError:  # the call itself will raise it
            return None
        return term.components

    def fits(self, other: LogitCall) -> bool:
        """Return whether one kernel computes both calls, given that they read the same arrays."""
        if self.parts is None or other.parts is None:
            return False
        return can_share_kernel(self.parts, other.parts)


@dataclass(frozen=True, eq=False)
class Fused:
    """Calls that one `compose_logits` computes, with the same results as one by one.

    Attributes:
        calls: The calls, in order.
        arrays: Their arrays by parameter.
    """

    calls: tuple[LogitCall, ...]
    arrays: Mapping[str, Array]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms."""
        return tuple(call.name for call in self.calls)

    @property
    def terms(self) -> list[tuple[str, dict[str, Any]]]:
        """The calls, as `compose_logits` takes them."""
        return [
            (call.fn.__name__, {**_term_options(call), "name": call.name, "weight": call.weight})
            for call in self.calls
        ]

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        """The reduction of the calls."""
        own: Literal["mean", "sum"] = self.calls[0].options.get("reduction", "mean")
        return own

    def compute(self, *, track_grad_norms: bool = False) -> ComposedLogits:
        """Compute the calls together; the result is by their names.

        Raises:
            InputError: As for `compose_logits`.
        """
        return compose_logits(
            terms=self.terms,
            reduction=self.reduction,
            track_grad_norms=track_grad_norms,
            **self.arrays,
        )


def is_fusable(fn: Callable[..., Array]) -> bool:
    """Return whether calls of a function can be fused with others."""
    return parameters_of(fn) is not None


def parameters_of(fn: Callable[..., Array]) -> tuple[str, ...] | None:
    """Arrays that `fn` takes by position; None if its calls cannot be fused."""
    return next((names for function, names in _FUNCTIONS if function is fn), None)


def fusable(calls: Iterable[LogitCall]) -> list[Fused]:
    """Group the calls that can be computed together, at least two in a group.

    Calls can be fused if they read the same logits array under the same mask, reduction and
    temperature, and do not differ in the reference, the targets or the limit of a log ratio:
    one kernel then computes all of them. Calls in no group are to be called as usual.

    Args:
        calls: Calls of one loss, with unique names.

    Returns:
        The groups; a call is in at most one of them.

    Example:
        >>> import numpy as np
        >>> from steelyard.penalties.from_logits import cross_entropy, kl
        >>> z, teacher, labels = np.zeros((2, 3)), np.ones((2, 3)), np.array([0, 2])
        >>> calls = [
        ...     LogitCall("ce", cross_entropy, {"logits": z, "targets": labels}),
        ...     LogitCall("length", len, {"logits": z}),
        ...     LogitCall("drift", kl, {"logits": z, "reference": teacher}, weight=0.1),
        ... ]
        >>> [group] = fusable(calls)
        >>> print(group.names, group.compute().total.round(4))
        ('ce', 'drift') 1.0986
    """
    groups: list[Fused] = []
    for call in calls:
        if call.parts is None:
            continue
        for i, group in enumerate(groups):
            if _can_join(group, call):
                groups[i] = Fused((*group.calls, call), {**group.arrays, **call.arrays})
                break
        else:
            groups.append(Fused((call,), dict(call.arrays)))
    return [group for group in groups if len(group.calls) > 1]


def _can_join(group: Fused, call: LogitCall) -> bool:
    first = group.calls[0]
    return (
        group.arrays["logits"] is call.arrays["logits"]
        and group.arrays.get("mask") is call.arrays.get("mask")
        and first.options.get("reduction", "mean") == call.options.get("reduction", "mean")
        and all(fusible.fits(call) for fusible in group.calls)
        and all(
            group.arrays[name] is call.arrays[name]
            for name in ("reference", "targets")
            if name in group.arrays and name in call.arrays
        )
    )


def _term_options(call: LogitCall) -> dict[str, Any]:
    """Options of the term: all but the reduction, which belongs to the call."""
    return {key: value for key, value in call.options.items() if key != "reduction"}
