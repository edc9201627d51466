"""Terms that return None, because the batch has nothing that they measure."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, telemetry
from steelyard.composition.bounds import GAIN, KI
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.composition.terms import UnmeasuredTermWarning
from steelyard.errors import InputError, TermResultError
from steelyard.penalties.from_logits import entropy, z_loss
from steelyard.spec.regularizer import Gradient, RunIn
from steelyard.telemetry import events

from .terms import LOGPROBS, nll, spec


def nothing(_: Any, logprobs: list[Tensor]) -> None:
    return None


def nothing_with_metrics(_: Any, logprobs: list[Tensor]) -> tuple[None, dict[str, float]]:
    return None, {"tokens": 0.0}


async def nothing_later(_: Any, logprobs: list[Tensor]) -> None:
    return None


def counted(data: list[bool], logprobs: list[Tensor]) -> Tensor | None:
    """Mean -log p of the data that count; None if none does."""
    kept = [row for row, counts in zip(logprobs, data, strict=True) if counts]
    return -torch.cat(kept).mean() if kept else None


def squares(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


def none_of(hidden: Tensor) -> None:
    return None


PLACES: list[tuple[RunIn, Gradient, Any]] = [
    ("inline", "auto", nothing),
    ("inline", "autograd", nothing_with_metrics),
    ("inline", "numerical", nothing),
    ("inline", "score", nothing),
    ("inline", "none", nothing),
    ("thread", "auto", nothing_with_metrics),
    ("thread", "autograd", nothing),
    ("thread", "numerical", nothing),
    ("thread", "score", nothing),
    ("process", "auto", nothing),
    ("process", "numerical", nothing_with_metrics),
    ("async", "auto", nothing_later),
    ("async", "numerical", nothing_later),
]


@pytest.mark.parametrize(("place", "gradient", "fn"), PLACES)
def test_a_term_without_a_value_is_left_out(place: RunIn, gradient: Gradient, fn: Any) -> None:
    empty = RegularizerSpec(fn, 0.5, "empty", run_in=place, gradient=gradient)
    output = Pipeline(nll, [empty, spec()], track_grad_norms=True).compute([1, 2, 3], LOGPROBS)
    without = Pipeline(nll, [spec()], track_grad_norms=True).compute([1, 2, 3], LOGPROBS)
    assert output.not_run == ("empty",)
    assert output.skipped == {}
    assert set(output.regularizers) == {"l2"}
    assert output.loss_total == without.loss_total
    assert output.total_grad_norm == without.total_grad_norm
    assert set(output.cosines) == {("base", "l2")}
    assert all(map(torch.equal, output.gradients, without.gradients))


@pytest.mark.parametrize("more", [{}, {"run_in": "thread"}, {"gradient": "numerical"}])
@pytest.mark.parametrize("aggregate", ["sum", "upgrad"])
def test_a_composite_leaves_it_out(more: dict[str, Any], aggregate: str) -> None:
    def total(*terms: RegularizerSpec) -> tuple[Tensor, CompositeLoss, Tensor]:
        hidden = torch.tensor([1.0, -2.0], requires_grad=True)
        loss = CompositeLoss(lambda hidden: hidden.sum(), terms, aggregate=aggregate)
        value = loss(hidden=hidden)
        value.backward()
        assert hidden.grad is not None
        return value, loss, hidden.grad

    size = term(squares, weight=0.5, name="size")
    value, loss, gradient = total(term(none_of, weight=3.0, name="empty", **more), size)
    without, _, expected = total(size)
    assert torch.equal(value, without)
    assert torch.equal(gradient, expected)
    assert loss.output.not_run == ("empty",)
    assert [result.ran for result in loss.results] == [True, False, True]


def test_a_compiled_composite_leaves_it_out() -> None:
    empty, size = (term(fn, weight=0.5, name=fn.__name__) for fn in (none_of, squares))
    loss = CompositeLoss(lambda hidden: hidden.sum(), [empty, size])
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    assert compiled(hidden=torch.tensor([1.0, 3.0])).item() == 4.0 + 0.5 * 5.0
    assert loss.output.not_run == ("none_of",)


@pytest.mark.parametrize("more", [{}, {"run_in": "thread"}, {"gradient": "numerical"}])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_term_that_the_caller_names_is_not_called(more: dict[str, Any], compiled: bool) -> None:
    """A trainer that knows that no token counts; the inputs of the term need not be there."""

    def refuse(mask: Tensor) -> Tensor:
        raise AssertionError(mask)

    named = [term(refuse, weight=0.5, name="named", **more), term(squares, 0.5, "size")]
    loss = CompositeLoss(lambda hidden: hidden.sum(), named)
    call = torch.compile(loss, backend="eager") if compiled else loss
    loss.unmeasured = {"named"}
    stopped = []
    telemetry.attach("test", events.TERM_STOP, lambda *event: stopped.append(event[2]))
    try:
        assert call(hidden=torch.tensor([1.0, 3.0])).item() == 4.0 + 0.5 * 5.0
    finally:
        telemetry.detach("test")
    assert loss.output.not_run == ("named",)
    assert [metadata["regularizer_name"] for metadata in stopped] == ["size"]
    loss.unmeasured = ()
    with pytest.raises(InputError, match="'named' reads the input 'mask', which is not there"):
        loss(hidden=torch.tensor([1.0, 3.0]))


def test_fused_terms_that_the_caller_names_are_not_called() -> None:
    logits = torch.randn(4, 7, requires_grad=True)
    fused = [term(fn, 0.5, fn.__name__, inputs="logits") for fn in (entropy, z_loss)]
    loss = CompositeLoss(lambda logits: logits.sum(), fused)
    loss.unmeasured = {"entropy"}
    total = loss(logits=logits)
    torch.testing.assert_close(total, logits.sum() + 0.5 * z_loss(logits))
    assert loss.output.not_run == ("entropy",)


def test_a_bound_is_held_over_the_calls_that_measured() -> None:
    logprobs = [torch.tensor([-2.0]), torch.tensor([-3.0])]
    pipeline = Pipeline(nll, [RegularizerSpec(counted, name="t", at_most=1.0)])
    for data in ([True, False], [False, False], [False, True]):  # calls of one optimizer step
        pipeline.compute(data, logprobs, 0)
    pipeline.compute([False, False], logprobs, 1)
    state = pipeline.state_dict()["t"]["multiplier"]
    assert state["gain"] == pytest.approx(GAIN * math.exp(1.5 * KI))  # the errors are 1 and 2
    assert state["steps"] == 1
    pipeline.compute([False, False], logprobs, 2)  # a step in which it measured nothing
    assert pipeline.state_dict()["t"]["multiplier"]["steps"] == 1


def test_it_takes_part_again_in_the_next_batch() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(counted, 1.0, "t", run_in="auto")])
    assert pipeline.compute([False] * 3, LOGPROBS).not_run == ("t",)
    output = pipeline.compute([False, True, False], LOGPROBS)
    assert output.not_run == ()
    assert output.regularizers["t"].value == 1.0


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_the_base_loss_has_to_have_a_value(run_in: RunIn) -> None:
    base = nothing if run_in == "inline" else nothing_later
    with pytest.raises(TermResultError, match="the base loss must return a scalar tensor"):
        Pipeline(base).compute([], LOGPROBS)


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_its_event_says_that_there_is_no_value(run_in: RunIn) -> None:
    stopped = []
    telemetry.attach("test", events.TERM_STOP, lambda *event: stopped.append(event[1:3]))
    try:
        empty = RegularizerSpec(nothing, 1.0, "empty", run_in=run_in)
        Pipeline(nll, [empty]).compute([], LOGPROBS)
    finally:
        telemetry.detach("test")
    ((measured, metadata),) = stopped
    assert metadata["regularizer_name"] == "empty"
    duration = measured.pop("duration")
    assert duration > 0
    assert measured == {"value": None, "contribution": None, "grad_norm": None}


def test_a_term_that_never_has_a_value_is_reported_once() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(nothing, 1.0, "forgot", run_in="inline")])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(19):
            pipeline.compute([], LOGPROBS)
    with pytest.warns(UnmeasuredTermWarning, match="'forgot' has returned None.* first 20 calls"):
        pipeline.compute([], LOGPROBS)
    for _ in range(20):  # any warning is an error in these tests
        pipeline.compute([], LOGPROBS)


def test_a_term_that_once_had_a_value_is_not_reported() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(counted, 1.0, "t", run_in="inline")])
    pipeline.compute([True] * 3, LOGPROBS)
    for _ in range(30):
        output = pipeline.compute([False] * 3, LOGPROBS)
    assert output.not_run == ("t",)


def test_inside_vmap_a_term_that_returns_none_adds_nothing() -> None:
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda x: None, 1.0, "nothing")])
    found = torch.func.vmap(lambda x: loss(x=x))(torch.ones(3, 2))
    assert found.tolist() == [2.0, 2.0, 2.0]
