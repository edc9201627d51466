"""Specs of terms: `RegularizerSpec`, the protocols it accepts, registry, weights, schedules."""

from steelyard.spec import schedules
from steelyard.spec.callables import (
    entry_point,
    is_async,
    listed,
    measurement,
    options_of,
    rejects,
    takes_generator,
)
from steelyard.spec.composed_loss import ComposedLoss, split_loss
from steelyard.spec.messages import (
    BASE,
    describe,
    describe_with_place,
    did_you_mean,
    keep_place,
    raised_at,
    shorten,
    title,
)
from steelyard.spec.numbers import is_finite, is_whole
from steelyard.spec.option_checks import OptionChecks
from steelyard.spec.placement import check_placement, split_placement
from steelyard.spec.protocol import (
    ChoosesNeeds,
    Metrics,
    Regularizer,
    Schedule,
    Stateful,
    TermFn,
)
from steelyard.spec.registry import build, lookup, lookup_penalty, register, registered
from steelyard.spec.regularizer import (
    Gradient,
    OnError,
    RegularizerSpec,
    RunIn,
    check_fields,
    check_run_in,
    check_timeout,
)
from steelyard.spec.weights import Bound, check_weight, weight_at

__all__ = [
    "BASE",
    "Bound",
    "ChoosesNeeds",
    "ComposedLoss",
    "Gradient",
    "Metrics",
    "OnError",
    "OptionChecks",
    "Regularizer",
    "RegularizerSpec",
    "RunIn",
    "Schedule",
    "Stateful",
    "TermFn",
    "build",
    "check_fields",
    "check_placement",
    "check_run_in",
    "check_timeout",
    "check_weight",
    "describe",
    "describe_with_place",
    "did_you_mean",
    "entry_point",
    "is_async",
    "is_finite",
    "is_whole",
    "keep_place",
    "listed",
    "lookup",
    "lookup_penalty",
    "measurement",
    "options_of",
    "raised_at",
    "register",
    "registered",
    "rejects",
    "schedules",
    "shorten",
    "split_loss",
    "split_placement",
    "takes_generator",
    "title",
    "weight_at",
]
