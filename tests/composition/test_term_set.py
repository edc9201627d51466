from __future__ import annotations

import pickle
import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, schedules
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.errors import SpecError, StateError, TermError, UnpicklableError

from .terms import LOGPROBS, Counter, l2, nll, spec, surprise


def test_state_is_collected_and_restored() -> None:
    first, base = Counter(), Counter()
    pipeline = Pipeline(base, [spec(first, 1.0, "c"), spec()])
    pipeline.compute([], LOGPROBS)
    state = pipeline.state_dict()
    assert state == {"base": {"calls": 1}, "c": {"calls": 1}, "(step)": 1}
    second, other_base = Counter(), Counter()
    fresh = Pipeline(other_base, [spec(second, 1.0, "c")])
    fresh.load_state_dict(state)
    assert (second.calls, other_base.calls) == (1, 1)
    with pytest.raises(StateError, match=r"exactly the stateful terms \['base', 'c'\], got \[\]"):
        fresh.load_state_dict({})


def test_changes_between_steps() -> None:
    pipeline = Pipeline(nll, [spec()])
    pipeline.set_weight("l2", 0.2)
    assert pipeline.compute([], LOGPROBS).regularizers["l2"].contribution == pytest.approx(3.302)
    pipeline.set_enabled("l2", False)
    assert pipeline.compute([], LOGPROBS).not_run == ("l2",)
    pipeline.set_enabled("l2", True)
    pipeline.set_weight("l2", schedules.constant(1.0))
    pipeline.add({"fn": surprise, "weight": 0.5, "name": "s"})
    assert [s.name for s in pipeline.specs] == ["l2", "s"]
    assert list(pipeline.compute([], LOGPROBS).regularizers) == ["l2", "s"]
    pipeline.remove("l2")
    assert list(pipeline.compute([], LOGPROBS).regularizers) == ["s"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.remove("nope"), r"one of \['l2'\], got 'nope'"),
        (lambda p: p.set_weight("nope", 1.0), r"one of \['l2'\], got 'nope'"),
        (lambda p: p.set_weight("l2", -1), "weight must be a finite number >= 0, got -1"),
        (lambda p: p.set_enabled("l2", "yes"), "enabled must be True or False, got 'yes'"),
        (lambda p: p.add(spec()), "names must be unique, and 'l2' stands twice"),
        (lambda p: p.add(spec(name="base")), "'base' is the base loss"),
        (lambda p: p.add(l2), "must be a RegularizerSpec or a mapping"),
    ],
)
def test_a_change_that_is_refused_changes_nothing(change: Any, message: str) -> None:
    pipeline = Pipeline(nll, [spec()])
    before = pipeline.specs
    with pytest.raises(SpecError, match=message):
        change(pipeline)
    assert pipeline.specs == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss_fn": None}, "loss_fn must be the base loss, callable as"),
        ({"loss_fn": 3}, "loss_fn must be the base loss, callable as"),
        ({"timeout": 0}, "timeout must be a number of seconds above 0 and at most 300, got 0"),
        ({"timeout": 301}, "got 301 .the pipeline."),
        ({"timeout": None}, "got None"),
        ({"max_concurrency": 0}, "max_concurrency must be a whole number >= 1 or None, got 0"),
        ({"max_concurrency": 1.5}, "max_concurrency must be a whole number"),
        ({"regularizers": [spec(name=str(i)) for i in range(101)]}, "at most 100 .* got 101"),
        ({"regularizers": [spec(), spec()]}, "names must be unique, and 'l2' stands twice"),
        ({"regularizers": spec()}, "regularizers must be a list of specs or of mappings, got Reg"),
        ({"regularizers": {"fn": l2, "weight": 1.0}}, "put a single one into a list"),
        (
            {"regularizers": [spec(lambda d, lp, logits: 0, needs=("logits",))]},
            "log-probs, and .'logits'. is not",
        ),
    ],
)
def test_a_bad_pipeline(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Pipeline(**{"loss_fn": nll, **arguments})


def test_a_term_that_cannot_travel_is_refused_when_it_is_added() -> None:
    lock = threading.Lock()

    def locked(_: Any, logprobs: list[Tensor]) -> Tensor:
        with lock:
            return l2(_, logprobs)

    with pytest.raises(UnpicklableError, match=r"regularizer 'locked'"):
        Pipeline(nll, [spec(locked, 1.0, "locked", run_in="process")])


def test_a_copy_goes_its_own_way() -> None:
    pipeline = Pipeline(nll, [spec()])
    for copied in (deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        copied.set_weight("l2", 7.0)
        assert copied.compute([], LOGPROBS).regularizers["l2"].weight == 7
    assert pipeline.compute([], LOGPROBS).regularizers["l2"].weight == 0.1


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_a_pipeline_is_not_computed_inside_its_own_terms(run_in: Any) -> None:
    pipelines: list[Pipeline] = []

    def nested(_: Any, logprobs: list[Tensor]) -> float:
        return pipelines[0].compute([], logprobs).loss_total

    before = threading.active_count()
    pipelines.append(Pipeline(nll, [spec(nested, 1.0, "nested", run_in=run_in, gradient="none")]))
    with pytest.raises(TermError, match="must not be computed inside one of its own terms"):
        pipelines[0].compute([], LOGPROBS)
    assert threading.active_count() <= before + 2


def test_an_async_term_does_not_compute_its_own_pipeline() -> None:
    pipelines: list[Pipeline] = []

    async def nested(_: Any, logprobs: list[Tensor]) -> float:
        return (await pipelines[0].acompute([], logprobs)).loss_total

    pipelines.append(Pipeline(nll, [spec(nested, 1.0, "nested", gradient="none")]))
    with pytest.raises(TermError, match="must not be computed inside one of its own terms"):
        pipelines[0].compute([], LOGPROBS)


def test_a_composite_is_not_called_inside_its_own_terms() -> None:
    def nested(x: Tensor) -> Tensor:
        total: Tensor = loss(x=x)
        return total

    loss = CompositeLoss(lambda x: x.sum(), [term(nested, 1.0, "nested")])
    with pytest.raises(TermError, match="must not be computed inside one of its own terms"):
        loss(x=torch.ones(2, requires_grad=True))


def test_a_term_may_compute_another_pipeline() -> None:
    inner = Pipeline(nll, [spec()])

    def nested(_: Any, logprobs: list[Tensor]) -> float:
        return inner.compute([], logprobs).loss_total

    outer = Pipeline(nll, [spec(nested, 1.0, "nested", run_in="inline", gradient="none")])
    for _ in range(2):
        assert outer.compute([], LOGPROBS).regularizers["nested"].value == pytest.approx(3.001)
