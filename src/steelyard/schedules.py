"""Weight schedules, under the name users import: see `steelyard.spec.schedules`."""

from steelyard.spec.schedules import constant, cosine, exponential, linear, piecewise, warmup

__all__ = ["constant", "cosine", "exponential", "linear", "piecewise", "warmup"]
