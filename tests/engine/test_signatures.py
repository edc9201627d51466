"""Signatures of the engine's clients against the installed SDK's, so that changes show here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tinker

from steelyard.engine import LocalSamplingClient, LocalServiceClient, LocalTrainingClient

PAIRS = {
    LocalServiceClient: tinker.ServiceClient,
    LocalTrainingClient: tinker.TrainingClient,
    LocalSamplingClient: tinker.SamplingClient,
}

# Methods that need the Tinker service: its console, accounts and connections.
ABSENT = {
    LocalServiceClient: {
        "copy_weights",
        "create_rest_client",
        "get_console_url",
        "get_telemetry",
        "holder",
    },
    LocalTrainingClient: {
        "get_console_url",
        "get_telemetry",
        "save_weights_external",
        "save_weights_external_async",
    },
    LocalSamplingClient: {
        "create",
        "from_sampler_handle",
        "get_sampler_handle",
        "get_telemetry",
        "on_queue_state_change",
    },
}


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def parameters(fn: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(fn).parameters.values()
    return [(p.name, p.kind, p.default) for p in found]


def is_async(fn: Any) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(fn))


VERBS = [
    pytest.param(ours, theirs, name, id=f"{theirs.__name__}.{name}")
    for ours, theirs in PAIRS.items()
    for name in sorted(public(theirs) - ABSENT[ours])
]


@pytest.mark.parametrize(("ours", "theirs", "name"), VERBS)
def test_a_method_has_the_parameters_of_the_sdks(ours: type, theirs: type, name: str) -> None:
    assert hasattr(ours, name)
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


@pytest.mark.parametrize(("ours", "theirs", "name"), VERBS)
def test_a_method_is_async_if_the_sdks_is(ours: type, theirs: type, name: str) -> None:
    assert is_async(getattr(ours, name)) == is_async(getattr(theirs, name))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.items())
def test_methods_left_out_on_purpose_exist_in_the_sdk_alone(ours: type, theirs: type) -> None:
    assert ABSENT[ours] <= public(theirs)
    assert not ABSENT[ours] & public(ours)


def test_the_service_has_the_parameters_of_the_sdks_without_the_connection() -> None:
    theirs = {name: rest for name, *rest in parameters(tinker.ServiceClient)}
    ours = {name: rest for name, *rest in parameters(LocalServiceClient)}
    connection = {"api_key", "base_url", "default_headers_overrides", "display_name", "kwargs"}
    assert connection <= theirs.keys()
    assert not connection & ours.keys()
    assert {name: ours.get(name) for name in theirs.keys() - connection} == {
        name: rest for name, rest in theirs.items() if name not in connection
    }
