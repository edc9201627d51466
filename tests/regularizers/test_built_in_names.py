"""Every regularizer has a name in config files and can be built from it."""

from __future__ import annotations

import inspect
from typing import Any

import cloudpickle
import pytest

import steelyard.regularizers
from steelyard import RegularizerSpec
from steelyard.errors import RegistryError
from steelyard.regularizers import Adaptive, ExternalValidation, TopologicalConsistency
from steelyard.spec.registry import BUILT_IN, lookup, registered

from .required_options import REQUIRED, URL, points

TERM_NAMES = {
    "adaptive": "adaptive_l1",
    "masked_importance_sampling": "masked_l1",
    "truncated_importance_sampling": "truncated_l1",
    "whole_vocabulary": "whole_entropy",
}

CLASSES = {name: getattr(steelyard.regularizers, name) for name in steelyard.regularizers.__all__}


def test_every_regularizer_has_a_name_in_config_files() -> None:
    assert {lookup(name) for name in BUILT_IN} == set(CLASSES.values())
    assert set(BUILT_IN) <= set(registered())


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_config_entry_builds_it(name: str) -> None:
    options = REQUIRED.get(lookup(name), {})
    spec = RegularizerSpec.from_dict({"fn": name, "weight": 0.1, "options": options})
    assert type(spec.fn) is lookup(name)
    assert spec.options == {}
    assert spec.name == TERM_NAMES.get(name, name)


@pytest.mark.parametrize(("short", "long"), [("kl", "kl_to_reference"), ("js", "js_to_reference")])
def test_a_short_name_becomes_the_name_of_the_term(short: str, long: str) -> None:
    assert lookup(short) is lookup(long)
    assert RegularizerSpec.from_dict({"fn": short, "weight": 0.1}).name == short
    named = {"fn": short, "weight": 0.1, "name": "drift"}
    assert RegularizerSpec.from_dict(named).name == "drift"


@pytest.mark.parametrize("name", BUILT_IN)
def test_stateless_regularizers_can_be_pickled(name: str) -> None:
    spec = RegularizerSpec.from_dict(
        {"fn": name, "weight": 0.1, "options": REQUIRED.get(lookup(name), {})}
    )
    if spec.stateful is None:
        assert repr(cloudpickle.loads(cloudpickle.dumps(spec.fn))) == repr(spec.fn)


def test_preferred_executors_and_gradient_methods() -> None:
    def preferences(cls: Any, **options: Any) -> tuple[str, str, bool]:
        spec = RegularizerSpec(cls(**{**REQUIRED.get(cls, {}), **options}), 1.0)
        return spec.run_in, spec.gradient, spec.is_async

    heavy = {
        "TopologicalConsistency": ("process", "autograd", False),
        "LogicalConsistency": ("process", "score", False),
        "ExternalValidation": ("auto", "score", True),
        "OverlongPenalty": ("auto", "score", False),
        "RelativeLength": ("auto", "score", False),
    }
    for name, cls in CLASSES.items():
        assert preferences(cls) == heavy.get(name, ("auto", "auto", False))
    assert preferences(TopologicalConsistency, differentiable=False)[1] == "score"
    wrapped = preferences(Adaptive, regularizer=ExternalValidation(url=URL))
    assert wrapped == ("auto", "score", True)
    wrapped = preferences(Adaptive, regularizer=TopologicalConsistency(points=points))
    assert wrapped == ("auto", "autograd", False)


def test_options_are_keyword_only() -> None:
    for cls in CLASSES.values():
        kinds = {p.kind for p in inspect.signature(cls).parameters.values()}
        assert kinds <= {inspect.Parameter.KEYWORD_ONLY}


def test_the_error_of_an_unknown_option_shows_no_values() -> None:
    options = {"url": "http://user:secret@host/?key=secret", "header": {"Authorization": "secret"}}
    with pytest.raises(RegistryError) as caught:
        RegularizerSpec.from_dict({"fn": "external_validation", "weight": 1.0, "options": options})
    assert str(caught.value) == (
        "'external_validation' cannot be made with the options ['url', 'header']: "
        "got an unexpected keyword argument 'header'; its options are 'url', 'payload', 'headers', "
        "'concurrency', 'request_timeout', 'retries', 'backoff', 'max_backoff', 'max_bytes', "
        "'unanswered', 'follow_redirects'."
    )
