"""Options without a default, for tests that build every regularizer."""

from __future__ import annotations

from typing import Any

from steelyard.regularizers import (
    Adaptive,
    ExternalValidation,
    LogicalConsistency,
    TopologicalConsistency,
    WholeVocabulary,
)


def points(datum: Any, logprobs: Any) -> Any:
    return logprobs[:, None]


URL = "http://127.0.0.1:1/check"


REQUIRED: dict[Any, dict[str, Any]] = {
    Adaptive: {"regularizer": "l1", "target": 1.0},
    ExternalValidation: {"url": URL},
    LogicalConsistency: {"constraints": points},
    TopologicalConsistency: {"points": points},
    WholeVocabulary: {"kind": "entropy"},
}
