from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, telemetry
from steelyard.errors import TermError

from .terms import LOGPROBS, broken, l2, nll, patient

Heard = list[tuple[str, dict[str, Any], dict[str, Any]]]


@pytest.fixture
def heard() -> Iterator[Heard]:
    events: Heard = []
    telemetry.attach_many(
        "test", telemetry.events.ALL, lambda e, m, meta, _: events.append((e, dict(m), dict(meta)))
    )
    yield events
    telemetry.detach("test")


def named(heard: Heard, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(m, meta) for event, m, meta in heard if event == f"steelyard.{name}"]


def test_a_step_at_which_norms_are_not_computed_says_so(heard: Heard) -> None:
    pipeline = Pipeline(nll, track_grad_norms=True, track_every=2)
    for step in (0, 1):
        pipeline.compute([], LOGPROBS, step)
    started = [metadata for _, metadata in named(heard, "custom_loss.start")]
    assert [metadata["track_grad_norms"] for metadata in started] == [True, False]


def test_a_call_from_start_to_stop(heard: Heard) -> None:
    specs = [RegularizerSpec(l2, 0.1, "l2", run_in="inline"), RegularizerSpec(patient, 0.2, "p")]
    pipeline = Pipeline(nll, specs, track_grad_norms=True)
    pipeline.model_id = "model-7"
    output = pipeline.compute([None] * 3, LOGPROBS)
    common = {
        "model_id": "model-7",
        "data_count": 3,
        "regularizer_count": 2,
        "track_grad_norms": True,
    }
    ((measured, metadata),) = named(heard, "custom_loss.start")
    assert metadata == common
    assert measured["system_time"] > 1.7e9
    ((measured, metadata),) = named(heard, "custom_loss.stop")
    assert metadata == common
    assert measured.pop("duration") > 0
    assert measured == {
        "loss_total": output.loss_total,
        "regularizer_total": output.regularizer_total,
        "total_grad_norm": output.total_grad_norm,
    }
    starts = {m["regularizer_name"]: m for _, m in named(heard, "regularizer.compute.start")}
    assert starts == {
        "l2": {"regularizer_name": "l2", "weight": 0.1, "is_async": False, "run_in": "inline"},
        "p": {"regularizer_name": "p", "weight": 0.2, "is_async": True, "run_in": "async"},
    }
    for measured, metadata in named(heard, "regularizer.compute.stop"):
        result = output.regularizers[metadata["regularizer_name"]]
        assert metadata == starts[result.name]
        assert measured == {
            "duration": result.duration,
            "value": result.value,
            "contribution": result.contribution,
            "grad_norm": result.grad_norm,
        }
    methods = {m["regularizer_name"]: m["method"] for _, m in named(heard, "custom_loss.gradient")}
    assert methods == {"base": "autograd", "l2": "autograd", "p": "autograd"}
    ((measured, metadata),) = named(heard, "regularizer.compose.complete")
    assert metadata == {"regularizer_count": 2}
    assert measured["loss_total"] == output.loss_total
    assert heard[0][0].endswith("custom_loss.start")
    assert heard[-1][0].endswith("custom_loss.stop")


def test_estimators_are_named(heard: Heard) -> None:
    def scores(_: Any, logprobs: list[Tensor]) -> list[float]:
        return [1.0, 2.0, 3.0]

    specs = [
        RegularizerSpec(l2, 0.1, "n", gradient="numerical"),
        RegularizerSpec(scores, 0.1, "s", gradient="score"),
        RegularizerSpec(l2, 0.1, "off", gradient="none"),
    ]
    Pipeline(nll, specs).compute([], LOGPROBS)
    methods = {m["regularizer_name"]: m["method"] for _, m in named(heard, "custom_loss.gradient")}
    assert methods == {"base": "autograd", "n": "numerical", "s": "score"}
    stops = {m["regularizer_name"]: v for v, m in named(heard, "regularizer.compute.stop")}
    assert all(values["grad_norm"] is None for values in stops.values())


@pytest.mark.parametrize("run_in", ["inline", "thread"])
@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_a_failure_is_told(heard: Heard, run_in: Any, on_error: Any) -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(broken, 1.0, "b", run_in=run_in, on_error=on_error)])
    if on_error == "skip":
        pipeline.compute(None, LOGPROBS)
        assert len(named(heard, "custom_loss.stop")) == 1
    else:
        with pytest.raises(TermError) as caught:
            pipeline.compute(None, LOGPROBS)
        ((measured, metadata),) = named(heard, "custom_loss.exception")
        assert metadata["reason"] is caught.value
        assert metadata["data_count"] is None
        assert measured["duration"] > 0
    ((measured, metadata),) = named(heard, "regularizer.compute.exception")
    assert isinstance(metadata["reason"], TermError)
    assert metadata["regularizer_name"] == "b"
    assert measured["duration"] > 0
    assert named(heard, "regularizer.compute.stop") == []


def test_a_handler_that_raises_never_reaches_training() -> None:
    def bad(*_: object) -> None:
        raise RuntimeError("handler")

    telemetry.attach("bad", "steelyard.custom_loss.stop", bad)
    assert Pipeline(nll).compute([], LOGPROBS).loss_total > 0
    assert telemetry.list_handlers("steelyard.custom_loss") == []
