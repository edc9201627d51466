"""Weights that follow the step, inside transformations too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from steelyard.errors import InputError
from steelyard.penalties import PenaltyPipeline


# `Any`: what comes in is what is being checked, and a step or a weight may be traced.
def check_schedules(schedules: Any, pipeline: PenaltyPipeline) -> dict[str, Callable[[Any], Any]]:
    """The schedules, each a function and each for a penalty that exists."""
    if not isinstance(schedules, Mapping):
        raise InputError(
            f"schedules must map names of penalties to functions of the step, got {schedules!r}."
        )
    for name, schedule in schedules.items():
        if name not in pipeline.names:
            there = ", ".join(repr(each) for each in pipeline.names) or "none"
            raise InputError(f"schedules must name penalties, got {name!r}; there are: {there}.")
        if not callable(schedule):
            raise InputError(
                f"the schedule of {name!r} must be a function of the step, got {schedule!r}: a "
                "number belongs in the pipeline, as weight."
            )
    return dict(schedules)


def weight_at(name: str, schedule: Callable[[Any], Any], step: Any) -> jax.Array:
    """The weight of a penalty at a step, which may be traced."""
    if step is None:
        raise InputError(
            f"the weight of {name!r} follows a schedule and must have a step, got step=None: "
            "call the loss with step=."
        )
    try:
        weight = jnp.asarray(schedule(step))
    except jax.errors.JAXTypeError as error:
        raise InputError(
            f"the schedule of {name!r} must work on a traced step, and {schedule!r} does not "
            f"({type(error).__name__}): take one of optax (linear_schedule, "
            "cosine_decay_schedule, …), or write it with jax.numpy."
        ) from error
    if weight.shape:
        raise InputError(
            f"the schedule of {name!r} must give one number, got shape {weight.shape}."
        )
    return weight
