"""Which calls of a loss go together: what a loss of several terms asks before it makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from steelyard.errors import InputError
from steelyard.penalties._arrays import Array
from steelyard.penalties.from_logits._components import Parts, go_together, read_terms
from steelyard.penalties.from_logits.composed_logits import ComposedLogits, compose_logits
from steelyard.penalties.from_logits.logit_terms import cross_entropy, entropy, js, kl, z_loss

# The functions whose calls can be made together, with the arrays that each takes by position.
_KINDS: Sequence[tuple[Callable[..., Array], tuple[str, ...]]] = (
    (cross_entropy, ("logits", "targets")),
    (entropy, ("logits",)),
    (js, ("logits", "reference")),
    (kl, ("logits", "reference")),
    (z_loss, ("logits",)),
)


@dataclass(frozen=True, eq=False)
class LogitCall:
    """A weighted call that a loss would make: `fn(**arrays, **options)`.

    Attributes:
        name: The term's name.
        fn: Any function; those of this package that reduce can be fused.
        arrays: What it reads, by parameter: `logits`, and `reference`, `targets`, `mask`.
        weight: What its value counts.
        options: What it takes beside them.
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
        """The call `fn(*args, **arrays, **options)`; None if it cannot be fused."""
        names = parameters_of(fn)
        if names is None or len(args) > len(names):
            return None
        named = {**arrays, **dict(zip(names, args, strict=False))}
        call = cls(name, fn, named, weight, options or {})
        return None if call.parts is None else call

    @cached_property
    def parts(self) -> Parts | None:
        """What `compose_logits` would make of it; None if it cannot."""
        reduces = self.options.get("reduction", "mean") != "none"
        if parameters_of(self.fn) is None or not reduces:
            return None
        try:
            [term] = read_terms([(self.fn.__name__, _own(self))], classes=2)
        except InputError:  # the call itself will say so
            return None
        return term.parts

    def fits(self, other: LogitCall) -> bool:
        """Whether one kernel computes both, if they read the same arrays."""
        if self.parts is None or other.parts is None:
            return False
        return go_together(self.parts, other.parts)


@dataclass(frozen=True, eq=False)
class Fused:
    """Calls that one `compose_logits` makes, with the same numbers as each for itself.

    Attributes:
        calls: The calls, in order.
        arrays: What they read, by parameter.
    """

    calls: tuple[LogitCall, ...]
    arrays: Mapping[str, Array]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the terms."""
        return tuple(call.name for call in self.calls)

    def compute(self, *, track_grad_norms: bool = False) -> ComposedLogits:
        """Make the calls; the result has their names.

        Raises:
            InputError: As for `compose_logits`.
        """
        return compose_logits(
            terms=[
                (call.fn.__name__, {**_own(call), "name": call.name, "weight": call.weight})
                for call in self.calls
            ],
            reduction=self.calls[0].options.get("reduction", "mean"),
            track_grad_norms=track_grad_norms,
            **self.arrays,
        )


def is_fusable(fn: Callable[..., Array]) -> bool:
    """Whether calls of a function can be made together with others."""
    return parameters_of(fn) is not None


def parameters_of(fn: Callable[..., Array]) -> tuple[str, ...] | None:
    """The arrays that `fn` takes by position; None if its calls cannot be fused."""
    return next((names for each, names in _KINDS if each is fn), None)


def fusable(calls: Iterable[LogitCall]) -> list[Fused]:
    """The calls that can be made together, in groups of at least two.

    Calls go together if they read the very same logits, under the same mask, reduction and
    temperature, and do not differ in the reference, the targets or the limit of a log ratio:
    those are what one kernel computes. What is in no group is to be called as ever.

    Args:
        calls: Those of one loss, with names of their own.

    Returns:
        The groups, each call in one at most.

    Example:
        >>> import numpy as np
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
            if _goes_with(group, call):
                groups[i] = Fused((*group.calls, call), {**group.arrays, **call.arrays})
                break
        else:
            groups.append(Fused((call,), dict(call.arrays)))
    return [group for group in groups if len(group.calls) > 1]


def _goes_with(group: Fused, call: LogitCall) -> bool:
    first = group.calls[0]
    return (
        group.arrays["logits"] is call.arrays["logits"]
        and group.arrays.get("mask") is call.arrays.get("mask")
        and first.options.get("reduction", "mean") == call.options.get("reduction", "mean")
        and all(each.fits(call) for each in group.calls)
        and all(
            group.arrays[name] is call.arrays[name]
            for name in ("reference", "targets")
            if name in group.arrays and name in call.arrays
        )
    )


def _own(call: LogitCall) -> dict[str, Any]:
    """The options that are the term's, not the call's."""
    return {key: value for key, value in call.options.items() if key != "reduction"}
