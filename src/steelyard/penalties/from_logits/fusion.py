"""Which calls of a loss go together: what a loss of several terms asks before it runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from steelyard.penalties._arrays import Array
from steelyard.penalties.from_logits.composition import ComposedLogits, compose_logits
from steelyard.penalties.from_logits.terms import cross_entropy, entropy, js, kl, z_loss

_KINDS: Mapping[Callable[..., Array], str] = {
    cross_entropy: "cross_entropy",
    entropy: "entropy",
    js: "js",
    kl: "kl",
    z_loss: "z_loss",
}


@dataclass(frozen=True)
class LogitCall:
    """A weighted call that a loss would make: `fn(*arrays, **options)`.

    Attributes:
        name: The term's name.
        fn: Any function; those of this package that reduce can be fused.
        inputs: The names of the arrays it takes, in order.
        weight: What its value counts.
        options: What it takes beside them.
    """

    name: str
    fn: Callable[..., Array]
    inputs: tuple[str, ...]
    weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # whatever `fn` takes


@dataclass(frozen=True)
class Fused:
    """Calls that one `compose_logits` makes, with the same numbers as each for itself.

    Attributes:
        calls: The calls, in order.
        logits: The name of the array that all of them read.
        reference: The name of the reference, if one compares.
        targets: The name of the targets, if one reads them.
    """

    calls: tuple[LogitCall, ...]
    logits: str
    reference: str | None
    targets: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the terms."""
        return tuple(call.name for call in self.calls)

    def compute(
        self, arrays: Mapping[str, Array], *, track_grad_norms: bool = False
    ) -> ComposedLogits:
        """Make the calls; the result has their names.

        Raises:
            InputError: As for `compose_logits`.
        """
        options = self.calls[0].options
        return compose_logits(
            arrays[self.logits],
            [
                (_KINDS[call.fn], {**_own(call), "name": call.name, "weight": call.weight})
                for call in self.calls
            ],
            reference=None if self.reference is None else arrays[self.reference],
            targets=None if self.targets is None else arrays[self.targets],
            mask=options.get("mask"),
            reduction=options.get("reduction", "mean"),
            track_grad_norms=track_grad_norms,
        )


def fusable(calls: Iterable[LogitCall]) -> list[Fused]:
    """The calls that can be made together, in groups of at least two.

    Calls go together if they read the same logits, by name, under the same mask and reduction,
    and do not differ in the reference or the targets. What is in no group is to be called as ever.

    Args:
        calls: Those of one loss, with names of their own.

    Returns:
        The groups, each call in one at most.

    Example:
        >>> calls = [
        ...     LogitCall("ce", cross_entropy, ("logits", "labels")),
        ...     LogitCall("length", len, ("logits",)),
        ...     LogitCall("drift", kl, ("logits", "teacher"), 0.1, {"direction": "reverse"}),
        ... ]
        >>> [group] = fusable(calls)
        >>> group.names
        ('ce', 'drift')
    """
    groups: list[Fused] = []
    for call in calls:
        if not _is_ours(call):
            continue
        alone = _alone(call)
        for i, group in enumerate(groups):
            joined = _joined(group, alone)
            if joined is not None:
                groups[i] = joined
                break
        else:
            groups.append(alone)
    return [group for group in groups if len(group.calls) > 1]


def _is_ours(call: LogitCall) -> bool:
    return call.fn in _KINDS and call.options.get("reduction", "mean") != "none"


def _alone(call: LogitCall) -> Fused:
    second = call.inputs[1] if len(call.inputs) > 1 else None
    reads_targets = call.fn is cross_entropy
    return Fused(
        (call,),
        call.inputs[0],
        None if reads_targets else second,
        second if reads_targets else None,
    )


def _joined(group: Fused, other: Fused) -> Fused | None:
    [call] = other.calls
    first = group.calls[0]
    same = (
        group.logits == other.logits
        and first.options.get("mask") is call.options.get("mask")
        and first.options.get("reduction", "mean") == call.options.get("reduction", "mean")
        and _agree(group.reference, other.reference)
        and _agree(group.targets, other.targets)
    )
    if not same:
        return None
    return Fused(
        (*group.calls, call),
        group.logits,
        group.reference or other.reference,
        group.targets or other.targets,
    )


def _agree(a: str | None, b: str | None) -> bool:
    return a is None or b is None or a == b


def _own(call: LogitCall) -> dict[str, Any]:
    """The options that are the term's, not the call's."""
    return {key: value for key, value in call.options.items() if key not in ("mask", "reduction")}
