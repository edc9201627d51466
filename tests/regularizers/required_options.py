"""Options without a default, for tests that build every regularizer."""

from __future__ import annotations

from typing import Any

from steelyard.regularizers import (
    Adaptive,
    ExternalValidation,
    LogicalConsistency,
    MaskedImportanceSampling,
    OverlongPenalty,
    TopologicalConsistency,
    TruncatedImportanceSampling,
    WholeVocabulary,
)


def points(datum: Any, logprobs: Any) -> Any:
    return logprobs[:, None]


URL = "http://127.0.0.1:1/check"


REQUIRED: dict[Any, dict[str, Any]] = {
    Adaptive: {"regularizer": "l1", "target": 1.0},
    ExternalValidation: {"url": URL},
    LogicalConsistency: {"constraints": points},
    MaskedImportanceSampling: {"regularizer": "l1"},
    OverlongPenalty: {"max_length": 4, "buffer": 2},
    TopologicalConsistency: {"points": points},
    TruncatedImportanceSampling: {"regularizer": "l1"},
    WholeVocabulary: {"kind": "entropy"},
}
