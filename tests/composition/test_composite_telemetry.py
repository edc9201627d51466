from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, telemetry
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import reads, term
from steelyard.errors import TermError

from .models import Heard, Net, activity, batch, cross_entropy, listening
from .terms import LOGPROBS, broken, l2, nll, patient

BASE = reads(nll, "data", "logprobs")


def leaves() -> list[Tensor]:
    return [lp.clone().requires_grad_() for lp in LOGPROBS]


def settled(heard: Heard) -> list[Any]:
    """The events in an order that does not depend on who was first, without what the clock says."""
    found = []
    for event, measured, metadata in heard:
        for key in ("duration", "system_time"):
            assert measured.pop(key, 1.0) > 0
        reason = metadata.pop("reason", None)
        why = (type(reason), str(reason))
        values = {k: None if v is None else round(v, 5) for k, v in measured.items()}
        found.append((event, metadata.get("regularizer_name", ""), metadata, values, why))
    return sorted(found, key=lambda each: each[:2])


def test_events_are_those_of_a_pipeline() -> None:
    specs = [
        RegularizerSpec(l2, 0.1, "l2", run_in="inline"),
        RegularizerSpec(patient, 0.2, "async"),
        RegularizerSpec(l2, 0.3, "numerical", gradient="numerical"),
        RegularizerSpec(l2, 0.4, "thread", run_in="thread"),
        RegularizerSpec(broken, 1.0, "broken", on_error="skip", run_in="inline"),
    ]
    with listening() as theirs:
        Pipeline(nll, specs, track_grad_norms=True).compute([1, 2], LOGPROBS)
    with listening() as mine:
        loss = CompositeLoss(BASE, specs, track_grad_norms=True)
        loss(data=[1, 2], logprobs=leaves())
    names = [event for event, *_ in mine]
    assert names[0] == "custom_loss.start"
    assert names[-2:] == ["regularizer.compose.complete", "custom_loss.stop"]
    assert settled(mine) == settled(theirs)


def test_a_gradient_that_is_left_to_the_caller_is_not_told() -> None:
    specs = [
        RegularizerSpec(l2, 0.1, "inline", run_in="inline"),
        RegularizerSpec(l2, 0.1, "thread", run_in="thread"),
        RegularizerSpec(l2, 0.1, "seldom", run_in="inline", every=2),
    ]
    with listening() as heard:
        loss = CompositeLoss(BASE, specs, track_grad_norms=True, track_every=2)
        for step in (1, 2):
            loss.step = step
            loss(data=[], logprobs=leaves())
            heard.append(("", {}, {}))
    at = [index for index, (event, *_) in enumerate(heard) if not event]
    told = [
        {m["regularizer_name"]: m["method"] for e, _, m in part if e == "custom_loss.gradient"}
        for part in (heard[: at[0]], heard[at[0] :])
    ]
    assert told[0] == {"thread": "autograd"}
    assert told[1] == dict.fromkeys(["base", "inline", "thread", "seldom"], "autograd")
    norms = [m["grad_norm"] for e, m, _ in heard if e == "regularizer.compute.stop"]
    assert norms[:2] == [None, None]
    assert all(norm > 0 for norm in norms[2:])


@pytest.mark.parametrize("event", ["custom_loss.gradient", "regularizer.compute.stop"])
def test_one_who_hears_a_single_event_hears_it(event: str) -> None:
    loss = CompositeLoss(BASE, [RegularizerSpec(l2, 0.1, "l2")], track_grad_norms=True)
    with listening(f"steelyard.{event}") as heard:
        loss(data=[], logprobs=leaves())
    assert {name for name, *_ in heard} == {event}
    assert heard[-1][2]["regularizer_name"] == "l2"


def test_named_inputs_are_told_like_others() -> None:
    model, (x, labels) = Net(), batch()
    loss = CompositeLoss(cross_entropy, [term(activity, 0.5, "activity")])
    with listening() as heard:
        loss(model(x), labels=labels)
    found = {event: (measured, metadata) for event, measured, metadata in heard}
    common = {
        "model_id": None,
        "data_count": None,
        "regularizer_count": 1,
        "track_grad_norms": False,
    }
    assert found["custom_loss.start"][1] == common
    measured, metadata = found["custom_loss.stop"]
    assert metadata == common
    assert measured["loss_total"] == loss.output.loss_total
    measured, metadata = found["regularizer.compute.stop"]
    assert metadata == {
        "regularizer_name": "activity",
        "weight": 0.5,
        "is_async": False,
        "run_in": "inline",
    }
    result = loss.output.regularizers["activity"]
    assert measured == {
        "duration": result.duration,
        "value": result.value,
        "contribution": result.contribution,
        "grad_norm": None,
    }


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_a_failure_is_told(run_in: Any) -> None:
    spec = RegularizerSpec(broken, 1.0, "b", run_in=run_in)
    loss = CompositeLoss(BASE, [spec])
    with listening() as heard, pytest.raises(TermError) as caught:
        loss(data=[], logprobs=leaves())
    found = {event: metadata for event, _, metadata in heard}
    assert found["custom_loss.exception"]["reason"] is caught.value
    assert found["regularizer.compute.exception"]["regularizer_name"] == "b"
    assert "regularizer.compute.stop" not in found
    assert "custom_loss.stop" not in found


@pytest.mark.parametrize("face", ["pipeline", "composite"])
def test_a_base_loss_that_fails_is_told_with_the_call_alone(face: str) -> None:
    spec = RegularizerSpec(l2, 1.0, "l2", run_in="inline")
    call: Any = Pipeline(broken, [spec]).compute
    if face == "composite":
        call = CompositeLoss(reads(broken, "data", "logprobs"), [spec])
    with listening() as heard, pytest.raises(TermError) as caught:
        call(data=[], logprobs=leaves())
    assert caught.value.term == "base"
    assert [event for event, *_ in heard] == ["custom_loss.start", "custom_loss.exception"]
    assert heard[-1][2]["reason"] is caught.value


def test_a_value_that_is_not_finite_is_told_with_its_weight() -> None:
    spec = term(lambda x: x.sum() / 0, 0.5, "t", on_error="skip")
    with listening() as heard:
        CompositeLoss(lambda x: x.sum(), [spec])(x=torch.ones(2))
    (metadata,) = [m for event, _, m in heard if event == "regularizer.compute.exception"]
    assert metadata["weight"] == 0.5
    assert [event for event, *_ in heard if event == "regularizer.compute.stop"] == []


@pytest.mark.parametrize("event", [None, "steelyard.custom_loss.start"])
def test_no_number_is_read_for_nobody(event: str | None) -> None:
    loss = CompositeLoss(lambda x: x.sum(), check_finite=False)
    with listening(*([event] if event else ["steelyard.penalties.compute.start"])):
        loss(x=torch.ones(2))
    # `output` is read from the tensors when somebody asks, and kept.
    assert [result.number for result in loss.results] == [None]
    assert loss.output is loss.output
    with listening("steelyard.custom_loss.stop") as heard:
        loss(x=torch.ones(2))
    assert heard[0][1]["loss_total"] == 2.0
    assert telemetry.list_handlers("steelyard") == []
