"""Weight schedules `step -> weight`, re-exported from `steelyard.spec.schedules`."""

from steelyard.spec.schedules import (
    by_epoch,
    constant,
    cosine,
    exponential,
    join,
    linear,
    piecewise,
    warmup,
)

__all__ = [
    "by_epoch",
    "constant",
    "cosine",
    "exponential",
    "join",
    "linear",
    "piecewise",
    "warmup",
]
