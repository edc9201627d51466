"""A value and a gradient that are two different choices."""

from __future__ import annotations

from torch import Tensor


def with_gradient_of(surrogate: Tensor, value: Tensor) -> Tensor:
    """A scalar that is exactly `value` and is differentiated as `surrogate`."""
    return value.detach() + (surrogate - surrogate.detach())
