"""Options: each one of each regularizer, and the sources of values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import RegistryError, SpecError
from steelyard.regularizers import (
    DPO,
    L1,
    L2,
    Adaptive,
    ConfidencePenalty,
    Consistency,
    DemographicParity,
    ElasticNet,
    EMADrift,
    Entropy,
    EqualizedOdds,
    ExternalValidation,
    KLToReference,
    LogicalConsistency,
    MaskedImportanceSampling,
    OverlongPenalty,
    RelativeLength,
    TopologicalConsistency,
    TruncatedImportanceSampling,
    WholeVocabulary,
    _options,
)

from .required_options import REQUIRED, points

FUNCTION = "a function, or 'package.module:attr' that names one"
SOURCE = "the name of a field, a function (datum, index), or 'package.module:attr'"


@pytest.mark.parametrize(
    ("cls", "option", "value", "rule"),
    [
        (L1, "of", "logits", "one of 'logprobs', 'probs'"),
        (L1, "reduction", "none", "one of 'mean', 'sum'"),
        (L2, "clip", 0, "a finite number > 0"),
        (L2, "center", "median", "a finite number"),
        (ElasticNet, "l1_ratio", 1.5, "a number in [0, 1]"),
        (ElasticNet, "l1_ratio", True, "a number in [0, 1]"),
        (Entropy, "mode", "up", "one of 'penalty', 'bonus'"),
        (Entropy, "temperature", 0, "a finite number > 0"),
        (Entropy, "normalize", 1, "True or False"),
        (Entropy, "vocabulary", 1, "a whole number >= 2"),
        (Entropy, "importance", 3, SOURCE),
        (ConfidencePenalty, "threshold", -1, "a finite number > 0"),
        (KLToReference, "estimator", "k4", "one of 'auto', 'exact', 'k1', 'k2', 'k3'"),
        (KLToReference, "direction", "both", "one of 'forward', 'reverse', 'symmetric'"),
        (KLToReference, "reference", "", SOURCE),
        (KLToReference, "reference", 3, SOURCE),
        (KLToReference, "reference", None, SOURCE),
        (KLToReference, "reference", "math:pi", FUNCTION),
        (KLToReference, "importance", "", SOURCE),
        (Consistency, "metric", "cosine", "one of 'mse', 'l1', 'kl', 'js'"),
        (Consistency, "level", "batch", "one of 'token', 'sequence'"),
        (Consistency, "pair", 3, SOURCE),
        (DPO, "beta", 0, "a finite number > 0"),
        (DPO, "label_smoothing", 0.5, "a number in [0, 0.5)"),
        (DPO, "label_smoothing", -0.1, "a number in [0, 1]"),
        (DemographicParity, "outcome", "rank", "one of 'logprob', 'prob'"),
        (DemographicParity, "power", 3, "1 or 2"),
        (DemographicParity, "test", "chi", "one of 'kruskal', 'anova', 'none'"),
        (EqualizedOdds, "label", 1, SOURCE),
        (EMADrift, "decay", 1.1, "a number in [0, 1]"),
        (Adaptive, "target", math.nan, "a finite number"),
        (Adaptive, "target", 0, "a number other than 0"),
        (Adaptive, "rate", 0, "a finite number > 0"),
        (Adaptive, "clip", -1, "a finite number > 0"),
        (Adaptive, "minimum", 0, "a finite number > 0"),
        (Adaptive, "maximum", 1e-9, "a finite number >= 0.0001"),
        (Adaptive, "initial", 1e9, "between minimum 0.0001 and maximum 10000"),
        (TopologicalConsistency, "points", 3, FUNCTION),
        (TopologicalConsistency, "dimensions", 3, "among 0, 1 and 2"),
        (TopologicalConsistency, "dimensions", (), "among 0, 1 and 2"),
        (TopologicalConsistency, "dimensions", "1", "among 0, 1 and 2"),
        (TopologicalConsistency, "dimensions", True, "among 0, 1 and 2"),
        (TopologicalConsistency, "power", 0.5, "a finite number >= 1"),
        (TopologicalConsistency, "max_edge", 0, "a finite number > 0"),
        (TopologicalConsistency, "scale", -1, "a finite number > 0"),
        (TopologicalConsistency, "differentiable", None, "True or False"),
        (LogicalConsistency, "constraints", "loose", FUNCTION),
        (LogicalConsistency, "solver_timeout", 0, "a finite number > 0"),
        (LogicalConsistency, "unknown", math.inf, "a finite number"),
        (ExternalValidation, "payload", {}, FUNCTION),
        (ExternalValidation, "concurrency", 0, "a whole number >= 1"),
        (ExternalValidation, "request_timeout", 0, "a finite number > 0"),
        (ExternalValidation, "retries", -1, "a whole number >= 0"),
        (ExternalValidation, "backoff", -1, "a finite number >= 0"),
        (ExternalValidation, "max_backoff", math.inf, "a finite number >= 0"),
        (ExternalValidation, "max_bytes", 0.5, "a whole number >= 1"),
        (ExternalValidation, "unanswered", "1", "a finite number"),
        (ExternalValidation, "follow_redirects", 1, "True or False"),
        (OverlongPenalty, "max_length", 0, "a whole number >= 1"),
        (OverlongPenalty, "buffer", 0, "a whole number >= 1"),
        (OverlongPenalty, "buffer", 5, "at most max_length"),
        (OverlongPenalty, "correct", 3, SOURCE),
        (RelativeLength, "group", None, SOURCE),
        (RelativeLength, "scale", "median", "one of 'mean', 'range', 'std'"),
        (RelativeLength, "threshold", math.nan, "a finite number"),
        (TruncatedImportanceSampling, "importance", None, SOURCE),
        (TruncatedImportanceSampling, "old", 3, SOURCE),
        (TruncatedImportanceSampling, "level", "batch", "one of 'token', 'sequence'"),
        (TruncatedImportanceSampling, "low", -1, "a finite number >= 0"),
        (MaskedImportanceSampling, "high", 0.25, "a finite number >= 0.5"),
        (WholeVocabulary, "of", "logprobs", "one of 'logits', 'projection'"),
        (WholeVocabulary, "reference", 3, SOURCE),
    ],
)
def test_an_invalid_option(cls: Any, option: str, value: Any, rule: str) -> None:
    wrappers = {
        Adaptive: "adaptive_l1",
        MaskedImportanceSampling: "masked_importance_sampling",
        TruncatedImportanceSampling: "truncated_importance_sampling",
        WholeVocabulary: "whole_entropy",
    }
    name = wrappers.get(cls) or cls.name
    with pytest.raises(SpecError) as caught:
        cls(**{**REQUIRED.get(cls, {}), option: value})
    assert str(caught.value) == f"{option} must be {rule}, got {value!r} (regularizer {name!r})."


def test_kl_and_js_have_no_sequence_level() -> None:
    with pytest.raises(SpecError) as caught:
        Consistency(metric="kl", level="sequence")
    assert str(caught.value) == (
        "level must be 'token' with metric='kl' or 'js', got 'sequence' (regularizer "
        "'consistency')."
    )


def test_functions_are_imported_by_their_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "def cloud(datum, logprobs): return logprobs[:, None]\ndef teacher(datum, index): return 1"
    )
    (tmp_path / "my_terms.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    term = TopologicalConsistency(points="my_terms:cloud")  # type: ignore[arg-type]  # as in a file
    assert term.points.__name__ == "cloud"
    assert KLToReference(reference="my_terms:teacher").reference.__name__ == "teacher"  # type: ignore[union-attr]
    with pytest.raises(RegistryError, match="cannot be imported"):
        KLToReference(reference="my_terms:taecher")


@dataclass(frozen=True)
class Sourced:
    """Smallest regularizer with a source."""

    source: Any
    name: str = "sourced"


def test_a_source_is_a_field_or_a_function() -> None:
    for source, expected in [("field", "field"), (points, points), ("math:sqrt", math.sqrt)]:
        regularizer = Sourced(source)
        _options.resolve_source(regularizer, "source")
        assert regularizer.source is expected
    _options.resolve_source(Sourced(None), "source", optional=True)
    for wrong in (None, "", 3):
        with pytest.raises(SpecError) as caught:
            _options.resolve_source(Sourced(wrong), "source")
        expected_message = f"source must be {SOURCE}, got {wrong!r} (regularizer 'sourced')."
        assert str(caught.value) == expected_message
