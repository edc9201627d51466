"""Weight schedules, under the name users import: see `steelyard.spec.schedules`."""

from steelyard.spec.schedules import (
    by_epoch,
    constant,
    cosine,
    exponential,
    linear,
    piecewise,
    warmup,
)

__all__ = ["by_epoch", "constant", "cosine", "exponential", "linear", "piecewise", "warmup"]
