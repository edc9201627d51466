"""What to run: specs, the protocols they accept, the registry, and weight schedules."""

from steelyard.spec import schedules
from steelyard.spec.protocol import Metrics, Regularizer, Schedule, Stateful, TermFn
from steelyard.spec.registry import lookup, register, registered
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
    "check_timeout",
    "check_weight",
    "lookup",
    "register",
    "registered",
    "schedules",
    "title",
]
