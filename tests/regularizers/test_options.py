"""Options are checked once, when a regularizer is built, and config files can name all."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import steelyard.regularizers
from steelyard import RegularizerSpec
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
    TopologicalConsistency,
    WholeVocabulary,
)
from steelyard.spec import lookup, registered
from steelyard.spec.built_in import BUILT_IN


def points(datum: Any, logprobs: Any) -> Any:
    return logprobs[:, None]


URL = "http://127.0.0.1:1/check"
FUNCTION = "a function, or 'package.module:attr' that names one"
SOURCE = "the name of a field, a function (datum, index), or 'package.module:attr'"
NEEDED: dict[Any, dict[str, Any]] = {
    Adaptive: {"regularizer": "l1", "target": 1.0},
    ExternalValidation: {"url": URL},
    LogicalConsistency: {"constraints": points},
    TopologicalConsistency: {"points": points},
    WholeVocabulary: {"kind": "entropy"},
}
NAMED = {"adaptive": "adaptive_l1", "whole_vocabulary": "whole_entropy"}


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
        (ConfidencePenalty, "threshold", -1, "a finite number > 0"),
        (KLToReference, "estimator", "k4", "one of 'k1', 'k2', 'k3'"),
        (KLToReference, "direction", "both", "one of 'forward', 'reverse', 'symmetric'"),
        (KLToReference, "reference", "", SOURCE),
        (KLToReference, "reference", 3, SOURCE),
        (KLToReference, "reference", None, SOURCE),
        (KLToReference, "reference", "math:pi", FUNCTION),
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
        (WholeVocabulary, "of", "logprobs", "one of 'logits', 'projection'"),
        (WholeVocabulary, "reference", 3, SOURCE),
    ],
)
def test_an_option_that_breaks_its_rule(cls: Any, option: str, value: Any, rule: str) -> None:
    name = {Adaptive: "adaptive_l1", WholeVocabulary: "whole_entropy"}.get(cls) or cls.name
    with pytest.raises(SpecError) as caught:
        cls(**{**NEEDED.get(cls, {}), option: value})
    assert str(caught.value) == f"{option} must be {rule}, got {value!r} (regularizer {name!r})."


def test_distributions_have_no_sequence_level() -> None:
    with pytest.raises(SpecError) as caught:
        Consistency(metric="kl", level="sequence")
    assert str(caught.value) == (
        "level must be 'token' with metric='kl' or 'js', got 'sequence' (regularizer "
        "'consistency')."
    )


# By name.

CLASSES = {name: getattr(steelyard.regularizers, name) for name in steelyard.regularizers.__all__}


def test_every_regularizer_has_a_name_in_config_files() -> None:
    assert {lookup(name) for name in BUILT_IN} == set(CLASSES.values())
    assert set(BUILT_IN) <= set(registered())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_config_entry_makes_it(name: str) -> None:
    options = NEEDED.get(lookup(name), {})
    spec = RegularizerSpec.from_dict({"fn": name, "weight": 0.1, "options": options})
    assert type(spec.fn) is lookup(name)
    assert spec.options == {}
    assert spec.name == NAMED.get(name, name)


@pytest.mark.parametrize(("short", "long"), [("kl", "kl_to_reference"), ("js", "js_to_reference")])
def test_a_short_name_is_the_name_of_its_term(short: str, long: str) -> None:
    assert lookup(short) is lookup(long)
    assert RegularizerSpec.from_dict({"fn": short, "weight": 0.1}).name == short
    named = {"fn": short, "weight": 0.1, "name": "drift"}
    assert RegularizerSpec.from_dict(named).name == "drift"


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_runs_in_a_process_can_travel_there(name: str) -> None:
    spec = RegularizerSpec.from_dict(
        {"fn": name, "weight": 0.1, "options": NEEDED.get(lookup(name), {})}
    )
    if spec.stateful is None:
        assert repr(cloudpickle.loads(cloudpickle.dumps(spec.fn))) == repr(spec.fn)


def test_where_each_runs_and_how_it_is_differentiated() -> None:
    def preferences(cls: Any, **options: Any) -> tuple[str, str, bool]:
        spec = RegularizerSpec(cls(**{**NEEDED.get(cls, {}), **options}), 1.0)
        return spec.run_in, spec.gradient, spec.is_async

    heavy = {
        "TopologicalConsistency": ("process", "autograd", False),
        "LogicalConsistency": ("process", "score", False),
        "ExternalValidation": ("auto", "score", True),
    }
    for name, cls in CLASSES.items():
        assert preferences(cls) == heavy.get(name, ("auto", "auto", False))
    assert preferences(TopologicalConsistency, differentiable=False)[1] == "score"
    wrapped = preferences(Adaptive, regularizer=ExternalValidation(url=URL))
    assert wrapped == ("auto", "score", True)
    wrapped = preferences(Adaptive, regularizer=TopologicalConsistency(points=points))
    assert wrapped == ("auto", "autograd", False)


def test_options_are_keywords() -> None:
    for cls in CLASSES.values():
        kinds = {p.kind for p in inspect.signature(cls).parameters.values()}
        assert kinds <= {inspect.Parameter.KEYWORD_ONLY}


def test_functions_come_by_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_unknown_option_is_named_without_values() -> None:
    options = {"url": "http://user:secret@host/?key=secret", "header": {"Authorization": "secret"}}
    with pytest.raises(RegistryError) as caught:
        RegularizerSpec.from_dict({"fn": "external_validation", "weight": 1.0, "options": options})
    assert str(caught.value) == (
        "'external_validation' cannot be made with the options ['url', 'header']: "
        "got an unexpected keyword argument 'header'; its options are 'url', 'payload', 'headers', "
        "'concurrency', 'request_timeout', 'retries', 'backoff', 'max_backoff', 'max_bytes', "
        "'unanswered', 'follow_redirects'."
    )
