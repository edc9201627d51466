"""Inputs and a penalty function that the tests of `PenaltyPipeline` and its terms share."""

from __future__ import annotations

from typing import Any

import numpy as np

from steelyard import schedules
from steelyard.penalties import PenaltyPipeline

from .backends import Backend

X = [3.0, -4.0]
STUDENT = np.log([[0.5, 0.5], [0.2, 0.8]])
TEACHER = np.log([[0.25, 0.75], [0.6, 0.4]])
WARMUP = PenaltyPipeline(["l1", ("l2", {"weight": schedules.warmup(1.0, 4)})])


def cube(x: Any) -> Any:
    return (x * x * x).sum()


def views(backend: Backend, dtype: str = "float64") -> dict[str, Any]:
    return {
        "student": backend.array(STUDENT, dtype),
        "teacher": backend.array(TEACHER, dtype),
    }
