"""Functions that the effect tests send to worker processes, which import this file alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import z3


def windows(datum: Any, logprobs: Any) -> Any:
    """Each log-prob and the next, as points of a plane."""
    return logprobs.unfold(0, 2, 1)


def points_field(datum: Any, logprobs: Any) -> Any:
    return datum.loss_fn_inputs["points"].to_torch()


def ascending(datum: Any, index: int) -> list[Any]:
    """Constraints that the tokens, read as numbers, are in ascending order."""
    numbers = [z3.Int(f"n{place}") for place in range(5)]
    given = datum.loss_fn_inputs["target_tokens"].to_torch().tolist()
    values = [number == value for number, value in zip(numbers, given, strict=True)]
    return values + [a < b for a, b in pairwise(numbers)]
