"""What to run: specs, the protocols they accept, the registry, and weight schedules.

The checks of numbers and callables that specs are validated with serve the other folders too.
"""

from steelyard.spec import schedules
from steelyard.spec.callables import entry_point, is_async, rejects
from steelyard.spec.numbers import is_finite, is_whole
from steelyard.spec.protocol import Metrics, Regularizer, Schedule, Stateful, TermFn
from steelyard.spec.registry import build, lookup, register, registered
from steelyard.spec.regularizer import (
    BASE,
    Gradient,
    OnError,
    RegularizerSpec,
    RunIn,
    check_timeout,
    check_weight,
    title,
)

__all__ = [
    "BASE",
    "Gradient",
    "Metrics",
    "OnError",
    "Regularizer",
    "RegularizerSpec",
    "RunIn",
    "Schedule",
    "Stateful",
    "TermFn",
    "build",
    "check_timeout",
    "check_weight",
    "entry_point",
    "is_async",
    "is_finite",
    "is_whole",
    "lookup",
    "register",
    "registered",
    "rejects",
    "schedules",
    "title",
]
