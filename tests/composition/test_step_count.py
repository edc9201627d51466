"""The step of a call that is not given one: pipelines count their calls, composites theirs."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import steelyard
from steelyard import Pipeline, RegularizerSpec, schedules, telemetry
from steelyard.composition.composite import CompositeLoss, UncountedStepWarning
from steelyard.composition.input_names import term
from steelyard.errors import ClosedError, InputError, SpecError, StateError, TermError
from steelyard.spec.protocol import Schedule
from steelyard.telemetry import events

from .terms import LOGPROBS, broken, l2, nll

START, RATE = -3.0, 0.025


def drift(_: Any, logprobs: list[Tensor]) -> Tensor:
    return 0.5 * (torch.cat(logprobs) - START).square().mean()


def number(step: int) -> float:
    return float(step)


def counting(**more: Any) -> Pipeline:
    """A pipeline whose term has the number of the step as its weight."""
    return Pipeline(nll, [RegularizerSpec(l2, number, "l2")], **more)


def step_of(pipeline: Pipeline, step: int | None = None) -> float:
    return pipeline.compute([], LOGPROBS, step).regularizers["l2"].weight


def descend(value_and_slope: Callable[[float], tuple[float, float]], steps: int) -> list[float]:
    """Minimize -x + λ·½(x + 3)² by hand, λ by the formulas of docs/spec.md; the term's values."""
    x, gain, sizes, values = START, 0.05, list[float](), list[float]()
    for step in range(steps):
        value, slope = value_and_slope(x)
        if step < 5:
            sizes.append(abs(-x) if abs(x) >= 0.01 else 1.0)
        unit = sum(sizes) / len(sizes) / 0.1
        error = (value - 0.1) / 0.1
        weight = unit * gain * max(0.0, 1 + 3.0 * min(error, 1.0))
        if weight or gain > 0.05:
            gain = max(0.0 if weight else 0.05, gain * math.exp(0.1 * min(error, 3.0)))
        values.append(value)
        x -= RATE * (-1.0 + weight * slope)
    return values


def test_a_bound_is_held_without_a_step() -> None:
    expected = descend(lambda x: (0.5 * (x - START) ** 2, x - START), 300)
    pipeline = Pipeline(nll, [RegularizerSpec(drift, name="kl", at_most=0.1)])
    logprobs, values = torch.tensor([START], dtype=torch.float64), []
    for _ in range(300):
        output = pipeline.compute([], [logprobs])
        values.append(output.regularizers["kl"].value)
        logprobs = logprobs - RATE * output.gradients[0]
    assert values == pytest.approx(expected, rel=1e-9)
    assert values[-1] == pytest.approx(0.1, rel=1e-2)


def test_a_composite_holds_a_bound_without_a_step() -> None:
    expected = descend(lambda x: (0.5 * (x - START) ** 2, x - START), 300)
    logprobs = torch.tensor([START], dtype=torch.float64, requires_grad=True)
    kl = RegularizerSpec(drift, name="kl", at_most=0.1)
    loss, values = CompositeLoss(lambda logprobs: -logprobs[0].mean(), [kl]), []
    for _ in range(300):
        logprobs.grad = None
        loss(data=[], logprobs=[logprobs]).backward()
        values.append(loss.output.regularizers["kl"].value)
        with torch.no_grad():
            logprobs -= RATE * logprobs.grad  # type: ignore[operator]  # it has one
    assert values == pytest.approx(expected, rel=1e-9)


# Pipelines.


def test_each_call_of_a_pipeline_is_a_step() -> None:
    pipeline = counting()
    assert [step_of(pipeline) for _ in range(4)] == [0, 1, 2, 3]


def test_a_given_step_sets_the_count() -> None:
    pipeline = counting()
    assert [step_of(pipeline, step) for step in (None, 7, None, 7, 7, None, 0, None)] == [
        0, 7, 8, 7, 7, 8, 0, 1,
    ]  # fmt: skip


def test_every_and_the_tracked_steps_follow_the_count() -> None:
    specs = [RegularizerSpec(l2, 0.1, "l2", every=3)]
    pipeline = Pipeline(nll, specs, track_grad_norms=True, track_every=2)
    outputs = [pipeline.compute([], LOGPROBS) for _ in range(5)]
    assert [output.not_run for output in outputs] == [(), ("l2",), ("l2",), (), ("l2",)]
    assert [output.total_grad_norm is not None for output in outputs] == [True, False] * 2 + [True]


def test_the_event_of_a_call_knows_its_step() -> None:
    seen = []
    telemetry.attach("test", events.CUSTOM_LOSS_START, lambda *event: seen.append(event[2]))
    try:
        pipeline = Pipeline(nll, track_grad_norms=True, track_every=2)
        for _ in range(3):
            pipeline.compute([], LOGPROBS)
    finally:
        telemetry.detach("test")
    assert [metadata["track_grad_norms"] for metadata in seen] == [True, False, True]


def test_concurrent_calls_have_different_steps() -> None:
    pipeline = counting()

    async def steps() -> list[float]:
        calls = [pipeline.acompute([], LOGPROBS) for _ in range(20)]
        return [output.regularizers["l2"].weight for output in await asyncio.gather(*calls)]

    assert asyncio.run(steps()) == list(range(20))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: step_of(pipeline), range(40)))
    assert sorted(found) == list(range(20, 60))


def test_acompute_takes_a_step() -> None:
    pipeline = counting()
    output = asyncio.run(pipeline.acompute([], LOGPROBS, 5))
    assert output.regularizers["l2"].weight == 5
    assert step_of(pipeline) == 6


def test_a_call_that_fails_has_begun() -> None:
    pipeline = counting()
    pipeline.add(RegularizerSpec(broken, 1.0, "broken", run_in="inline"))
    with pytest.raises(TermError):
        pipeline.compute([], LOGPROBS)
    pipeline.remove("broken")
    assert step_of(pipeline) == 1


@pytest.mark.parametrize("step", [-1, 1.5, "2", True])
def test_a_wrong_step_is_refused_and_not_counted(step: Any) -> None:
    pipeline = counting()
    with pytest.raises(InputError, match="step must be a whole number >= 0"):
        pipeline.compute([], LOGPROBS, step)
    assert step_of(pipeline) == 0


def test_a_closed_pipeline_is_refused_without_a_step_too() -> None:
    pipeline = counting()
    pipeline.close()
    with pytest.raises(ClosedError):
        pipeline.compute([], LOGPROBS)


def test_a_single_call_is_at_step_0() -> None:
    spec = RegularizerSpec(l2, lambda step: 1.0 + step, "l2")
    for _ in range(2):
        output = steelyard.compute([], LOGPROBS, nll, regularizers=[spec])
        assert output.regularizers["l2"].weight == 1


def test_the_count_is_saved() -> None:
    pipeline = counting()
    step_of(pipeline, 4)
    state = json.loads(json.dumps(pipeline.state_dict()))
    assert state == {"(step)": 5}
    other = counting()
    other.load_state_dict(state)
    assert step_of(other) == 5
    for copied in (copy.deepcopy(Pipeline(nll, after=pipeline)), Pipeline(nll, after=pipeline)):
        assert copied.state_dict() == {"(step)": 5}
    plain = Pipeline(nll, [RegularizerSpec(l2, 0.1, "l2")])
    plain.load_state_dict(state)
    assert pickle.loads(pickle.dumps(plain)).state_dict() == {"(step)": 5}


def test_a_state_without_a_count_loads() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(drift, name="kl", at_most=0.1)])
    pipeline.compute([], LOGPROBS)
    state = pipeline.state_dict()
    del state["(step)"]  # as 0.1.0 saved it
    pipeline.compute([], LOGPROBS)
    pipeline.load_state_dict(state)
    assert pipeline.state_dict() == {**state, "(step)": 2}


@pytest.mark.parametrize("step", [-1, 1.5, None, "3"])
def test_a_damaged_count_is_an_error_and_changes_nothing(step: Any) -> None:
    pipeline = counting()
    step_of(pipeline, 4)
    with pytest.raises(StateError, match=r"'\(step\)' of a state must be a whole number >= 0"):
        pipeline.load_state_dict({"(step)": step})
    assert step_of(pipeline) == 5


def test_no_term_has_the_name_of_the_count() -> None:
    with pytest.raises(SpecError, match="'\\(step\\)' is the number of the step"):
        Pipeline(nll, [RegularizerSpec(l2, 0.1, "(step)")])


def test_a_second_pipeline_evaluates() -> None:
    """Neither the count nor the multiplier of training moves; the value is the term's."""
    spec = RegularizerSpec(drift, name="kl", at_most=0.1)
    training = Pipeline(nll, [spec])
    training.compute([], LOGPROBS)
    before = training.state_dict()
    held_out = [torch.tensor([-1.0, -2.0])]
    measured = Pipeline(nll, [spec.measuring()]).compute([], held_out)
    assert measured.regularizers["kl"].value == pytest.approx(0.5 * (4 + 1) / 2)
    assert measured.regularizers["kl"].contribution == 0
    assert training.state_dict() == before


# Composites.


def size_of(hidden: Tensor) -> Tensor:
    return hidden.square().sum()


def composite(weight: float | Schedule = number, **more: Any) -> CompositeLoss:
    return CompositeLoss(
        lambda hidden: hidden.sum(), [term(size_of, weight, "size", **more)], track_every=2
    )


def weight_of(loss: Callable[..., Tensor], of: CompositeLoss | None = None) -> float:
    loss(hidden=torch.ones(2, requires_grad=True))
    composite = loss if of is None else of
    assert isinstance(composite, CompositeLoss)
    return composite.output.regularizers["size"].weight


def test_a_composite_counts_its_calls_with_gradients() -> None:
    loss = composite()
    found = []
    for gradients in (False, True, True, False, True, False):
        with torch.set_grad_enabled(gradients):
            found.append((weight_of(loss), loss.step))
    assert found == [(0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2)]


def test_every_and_tracking_follow_the_calls_of_a_composite() -> None:
    fields: dict[str, Any] = {"track_grad_norms": True, "track_every": 2}
    loss = CompositeLoss(
        lambda hidden: hidden.sum(), [term(size_of, 0.5, "size", every=3)], **fields
    )
    found = []
    for _ in range(4):
        loss(hidden=torch.ones(2, requires_grad=True))
        found.append((loss.output.not_run, loss.output.total_grad_norm is not None))
    assert found == [((), True), (("size",), False), (("size",), True), ((), False)]


def test_a_composite_counts_for_terms_that_come_later() -> None:
    loss = composite(0.5)
    for _ in range(3):
        weight_of(loss)
    loss.set_weight("size", number)
    assert weight_of(loss) == 3


def test_a_step_that_is_set_stays() -> None:
    """Under accumulation several calls are of one step."""
    loss = composite()
    weight_of(loss)
    for step in (5, 6):
        loss.step = step
        assert [weight_of(loss) for _ in range(3)] == [step] * 3


def test_an_optimizer_that_is_followed_counts_alone() -> None:
    loss, parameter = composite(), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    loss.follow(optimizer)
    found = []
    for _ in range(3):
        found += [weight_of(loss) for _ in range(2)]
        optimizer.step()
    assert found == [0, 0, 1, 1, 2, 2]


def test_a_composite_saves_its_count() -> None:
    loss = composite()
    fresh = loss.get_extra_state()
    assert fresh["step"] == 0
    for _ in range(3):
        weight_of(loss)
    other = composite()
    other.load_state_dict(loss.state_dict())
    assert [weight_of(other) for _ in range(2)] == [3, 4]
    assert [weight_of(loss) for _ in range(2)] == [3, 4]  # saving counts nothing
    other.set_extra_state(fresh)
    assert weight_of(other) == 0
    other.step = 7
    again = composite()
    again.load_state_dict(other.state_dict())
    assert [weight_of(again) for _ in range(2)] == [7, 8]


def test_a_bad_weight_is_an_error_of_its_own_step() -> None:
    loss = composite(lambda step: 1.0 - step)
    assert [weight_of(loss) for _ in range(2)] == [1, 0]
    with pytest.raises(SpecError, match="at step 2"):
        weight_of(loss)


def test_a_mapped_call_counts() -> None:
    loss = composite(schedules.linear(0.0, 1.0, 10))

    def gradient(hidden: Tensor) -> Tensor:
        found: Tensor = torch.func.grad(lambda h: loss(hidden=h))(hidden)
        return found

    for step in range(3):
        found = torch.func.vmap(gradient)(torch.ones(4, 2))
        assert found.tolist() == [[pytest.approx(1 + 2 * 0.1 * step)] * 2] * 4


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


NEEDS_STEPS: list[dict[str, Any]] = [
    {"weight": number},
    {"weight": None, "at_most": 1.0},
    {"weight": 0.5, "every": 2},
]


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("fields", NEEDS_STEPS)
def test_a_compiled_composite_asks_for_a_step_once(fields: dict[str, Any]) -> None:
    loss = composite(**fields)
    compiled = torch.compile(loss, backend="eager", dynamic=False)
    inputs = [torch.ones(rows, requires_grad=True) for rows in (2, 2, 3)]
    with pytest.warns(UncountedStepWarning, match=r"follow\(optimizer\)"):
        compiled(hidden=inputs[0])
    for hidden in inputs:  # another size is another graph; a second warning would be an error
        compiled(hidden=hidden)
    assert loss.step == 0


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("source", ["set", "followed", "not needed"])
def test_a_compiled_composite_with_a_step_is_silent_and_one_graph(source: str) -> None:
    loss = composite(0.5 if source == "not needed" else number)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    if source == "followed":
        loss.follow(optimizer)
    counter, found = CompileCounter(), []
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedStepWarning)
        for step in range(4):
            if source == "set":
                loss.step = step
            found.append(weight_of(compiled, loss))
            optimizer.step()
    assert found == ([0.5] * 4 if source == "not needed" else [0, 1, 2, 3])
    assert counter.frame_count == 1


def test_a_call_that_is_compiled_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_inside_of_compile…`, without the compiler, whose code coverage does not see."""
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda x: x.sum(), 1.0, "t", every=2)])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.warns(UncountedStepWarning, match="does not count its calls"):
        loss._count_call()
    loss._count_call()
    plain = CompositeLoss(lambda x: x.sum(), [term(lambda x: x.sum(), 1.0, "t")])
    plain._count_call()
    assert (loss.step, plain.step) == (0, 0)
