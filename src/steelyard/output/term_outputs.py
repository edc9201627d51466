"""Outputs of the base loss and of one regularizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class BaseLossOutput:
    """The base loss of one call.

    Attributes:
        value: the loss.
        grad_norm: L2 norm of d base / d logprobs; None unless tracked.
        custom: the metrics the loss function returned.
    """

    value: float
    grad_norm: float | None = None
    custom: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; `grad_norm` is there only when tracked."""
        return _without_none(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BaseLossOutput:
        """The inverse of `to_dict`."""
        return cls(**values)


@dataclass(frozen=True)
class RegularizerOutput:
    """One regularizer of one call.

    Attributes:
        name: the name in its spec.
        value: the raw value, before the weight.
        weight: the weight at this step; under a bound, the multiplier.
        contribution: weight * value, what it adds to the loss; -weight * value under a lower
            bound.
        grad_norm: L2 norm of d value / d logprobs; None unless tracked, and for a term
            without a gradient.
        grad_norm_weighted: weight * grad_norm.
        custom: the metrics the regularizer returned.
        duration: seconds it took, its gradient included.
        grad_space: what its gradient is with respect to.
        bound: the bound of its value at this step; None for a term with a weight.
        violation: by how much the value is beyond the bound, 0 if it is not; None for a term
            with a weight.
    """

    name: str
    value: float
    weight: float
    contribution: float
    grad_norm: float | None = None
    grad_norm_weighted: float | None = None
    custom: Mapping[str, float] = field(default_factory=dict)
    duration: float = 0.0
    grad_space: str = "logprobs"
    bound: float | None = None
    violation: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready mapping; gradient fields are there only when tracked."""
        values = _without_none(self)
        if self.grad_norm is None and self.grad_space == "logprobs":
            del values["grad_space"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RegularizerOutput:
        """The inverse of `to_dict`."""
        return cls(**values)


def _without_none(output: BaseLossOutput | RegularizerOutput) -> dict[str, Any]:
    values = {f.name: getattr(output, f.name) for f in fields(output)}
    values["custom"] = dict(output.custom)
    return {name: value for name, value in values.items() if value is not None}
