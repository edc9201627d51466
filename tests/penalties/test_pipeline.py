"""`PenaltyPipeline`: totals, metrics, updates, schedules, telemetry and errors."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch

from steelyard import schedules, telemetry
from steelyard.errors import InputError
from steelyard.penalties import PenaltyPipeline, kl_divergence, l1

from .backends import JAX, TORCH, Backend
from .pipeline_inputs import STUDENT, TEACHER, WARMUP, X, cube, views


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_total_and_metrics_of_one_input(backend: Backend, dtype: str) -> None:
    pipeline = PenaltyPipeline(
        [("l1", {"weight": 0.5}), "l2", (cube, {"weight": -1}), ("l2", {"name": "b", "clip": 1})]
    )
    x = backend.array(X, dtype)
    total, metrics = pipeline.compute(x)
    assert metrics == {
        "l1": 7.0,
        "l1_weighted": 3.5,
        "l2": 25.0,
        "l2_weighted": 25.0,
        "cube": -37.0,
        "cube_weighted": 37.0,
        "b": 2.0,
        "b_weighted": 2.0,
        "total": 67.5,
    }
    assert all(type(value) is float for value in metrics.values())
    assert backend.is_mine(total)
    assert backend.dtype(total) == dtype
    assert backend.numpy(total) == backend.numpy(pipeline.compute_total(x)) == 67.5


def test_every_built_in_name(backend: Backend) -> None:
    pair = {"inputs": ("student", "teacher")}
    one = {"inputs": "student"}
    pipeline = PenaltyPipeline(
        [
            *((name, one) for name in ("l1", "l2", "elastic_net", "entropy", "orthogonality")),
            ("output_magnitude", one),
            *((name, pair) for name in ("kl", "js", "consistency")),
        ]
    )
    total, metrics = pipeline.compute(views(backend))
    assert len(metrics) == 2 * 9 + 1
    raw = sum(metrics[name] for name in pipeline.names)
    np.testing.assert_allclose(backend.numpy(total), raw, rtol=1e-12)
    expected = kl_divergence(STUDENT, TEACHER)
    np.testing.assert_allclose(metrics["kl"], expected, rtol=1e-12)


def test_updates_leave_the_old_pipeline_alone() -> None:
    x = np.array(X)
    first = PenaltyPipeline(["l1"])
    second = first.add("cubes", cube, weight=2.0)
    third = second.update_weight("l1", -3)
    fourth = third.set_enabled("cubes", False)
    fifth = third.remove("l1")
    sixth = fourth.add("mean_l2", "l2", reduction="mean")
    assert [float(each.compute_total(x)) for each in (first, second, third, fourth, fifth)] == [
        7.0,
        7.0 - 74.0,
        -21.0 - 74.0,
        -21.0,
        -74.0,
    ]
    assert float(sixth.compute_total(x)) == -21.0 + 12.5
    assert first.names == ("l1",)
    assert fifth.names == ("cubes",)
    assert len(sixth) == 3
    assert repr(sixth) == "PenaltyPipeline(-3 * l1 + 2 * cubes (off) + 1 * mean_l2)"
    assert float(fourth.set_enabled("cubes", True).compute_total(x)) == -95.0


def test_options_are_copied() -> None:
    options: dict[str, Any] = {"weight": 1.0, "scale": 2.0}
    pipeline = PenaltyPipeline([("l1", options)])
    options["scale"] = 100.0
    assert float(pipeline.compute_total(np.array(X))) == 14.0


def test_a_pipeline_pickles() -> None:
    pipeline = pickle.loads(pickle.dumps(PenaltyPipeline([("l1", {"weight": 0.5}), cube])))
    assert pipeline.names == ("l1", "cube")
    assert float(pipeline.compute_total(np.array(X))) == 3.5 - 37


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_enabled_term(backend: Backend, track: bool, dtype: str) -> None:
    x = backend.array(X, dtype)
    for pipeline in (PenaltyPipeline(), PenaltyPipeline(["l1"]).set_enabled("l1", False)):
        for inputs in (x, {"n": 3, "x": x}):
            total, metrics = pipeline.compute(inputs, track_grad_norms=track)
            assert metrics == {"total": 0.0}
            assert backend.is_mine(total)
            assert backend.dtype(total) == dtype
            assert backend.numpy(total) == 0.0
    assert PenaltyPipeline().compute({}) == (0.0, {"total": 0.0})


@pytest.mark.parametrize("track", [False, True])
def test_total_is_differentiable(track: bool) -> None:
    x = torch.tensor(X, requires_grad=True)
    weight = torch.tensor(2.0, requires_grad=True)
    pipeline = PenaltyPipeline(["l2", (lambda x: weight * x.sum(), {"name": "w", "weight": 3.0})])
    total, _ = pipeline.compute(2 * x, track_grad_norms=track)
    total.backward()
    assert x.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([8 * 3.0 + 12.0, 8 * -4.0 + 12.0]))
    torch.testing.assert_close(weight.grad, torch.tensor(3.0 * -2.0))


def test_nan_shows_in_the_metrics(backend: Backend) -> None:
    total, metrics = PenaltyPipeline(["l1"]).compute(backend.array([np.nan]))
    assert math.isnan(metrics["l1"])
    assert math.isnan(metrics["total"])
    assert np.isnan(backend.numpy(total))


def test_jax_transformations() -> None:
    pipeline = PenaltyPipeline([("l1", {"weight": 0.5}), ("l2", {"weight": 2.0})])
    x = JAX.array(X)
    assert jax.jit(pipeline.compute_total)(x) == 53.5
    np.testing.assert_array_equal(jax.grad(pipeline.compute_total)(x), [12.5, -16.5])
    np.testing.assert_array_equal(jax.vmap(pipeline.compute_total)(x[:, None]), [19.5, 34.0])
    for transformed in (jax.jit(pipeline.compute), jax.grad(lambda x: pipeline.compute(x)[0])):
        with pytest.raises(InputError, match=r"call compute_total inside jax.jit"):
            transformed(x)


# Schedules.


def test_a_weight_may_follow_a_schedule(backend: Backend) -> None:
    x = backend.array(X)
    total, metrics = WARMUP.compute(x, 1)
    assert metrics == {
        "l1": 7.0,
        "l1_weighted": 7.0,
        "l2": 25.0,
        "l2_weighted": 6.25,
        "total": 13.25,
    }
    assert backend.numpy(total) == backend.numpy(WARMUP.compute_total(x, 1)) == 13.25
    assert WARMUP.compute(x)[1]["total"] == backend.numpy(WARMUP.compute_total(x)) == 7.0
    assert (
        WARMUP.compute(x, step=9)[1]["total"]
        == backend.numpy(WARMUP.compute_total(x, step=9))
        == 32
    )


def test_every_update_accepts_a_schedule() -> None:
    def falling(step: int) -> float:
        return 1.0 - step

    pipeline = PenaltyPipeline(["l1"]).add("cubes", cube, weight=falling)
    changed = pipeline.update_weight("l1", schedules.linear(0.0, 2.0, 4))
    assert changed.weights(3) == {"l1": 1.5, "cubes": -2.0}
    assert changed.set_enabled("cubes", False).weights(3) == {"l1": 1.5}
    assert [each.weight_at(1) for each in changed.terms] == [0.5, 0.0]
    assert float(changed.compute_total(np.array(X), 3)) == 1.5 * 7 - 2 * -37
    assert repr(changed.set_enabled("l1", False)) == (
        "PenaltyPipeline(_Linear(start=0.0, end=2.0, steps=4) * l1 (off) + falling * cubes)"
    )
    assert pickle.loads(pickle.dumps(WARMUP)).weights(2) == {"l1": 1.0, "l2": 0.5}


SCHEDULES = {
    "constant": schedules.constant(0.3),
    "linear": schedules.linear(0.1, 0.9, 7),
    "warmup": schedules.warmup(0.5, 4),
    "exponential": schedules.exponential(0.9, 0.8),
    "cosine": schedules.cosine(0.9, 0.1, 7),
    "piecewise": schedules.piecewise({0: 0.1, 3: 0.7}),
    "by_epoch": schedules.by_epoch(schedules.linear(0.1, 0.9, 4), 2),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_traced_step_gives_the_same_total(schedule: Any) -> None:
    """Inside `jax.jit` and `torch.compile` the total is the one outside."""
    pipeline = PenaltyPipeline(["l1", ("l2", {"weight": schedule})])
    jitted = jax.jit(pipeline.compute_total)
    slope = jax.jit(jax.grad(pipeline.compute_total))
    torch.compiler.reset()
    compiled = torch.compile(pipeline.compute_total, fullgraph=True, backend="eager")
    for step in (0, 1, 2, 5, 11):
        weight = schedule(step)
        assert float(jitted(JAX.array(X), step)) == pytest.approx(7 + 25 * weight, rel=1e-6)
        expected = [1 + 6 * weight, -1 - 8 * weight]
        np.testing.assert_allclose(slope(JAX.array(X), step), expected, rtol=1e-6)
        found = compiled(TORCH.array(X), step)
        assert float(found) == pytest.approx(7 + 25 * weight, rel=1e-6)
        tensor = compiled(TORCH.array(X), torch.tensor(step))
        assert float(tensor) == pytest.approx(7 + 25 * weight, rel=1e-6)


@pytest.mark.parametrize("tracked", [False, True])
def test_compute_rejects_what_is_traced(tracked: bool) -> None:
    def of_input(traced: Any) -> Any:
        return WARMUP.compute(traced, 1, track_grad_norms=tracked)[0]

    def of_step(traced: Any) -> Any:
        return WARMUP.compute(JAX.array(X), traced, track_grad_norms=tracked)[0]

    def of_closure(traced: Any) -> Any:
        pipeline = PenaltyPipeline([(lambda x: (x * traced).sum(), {"name": "product"})])
        return pipeline.compute(JAX.array(X), track_grad_norms=tracked)[0]

    for compute in (of_input, of_step, of_closure):
        with pytest.raises(InputError, match=r"call compute_total inside jax.jit"):
            jax.jit(compute)(1.0)


# Names.


def test_terms_of_another_pipeline_can_be_reused() -> None:
    assert PenaltyPipeline([*WARMUP.terms, cube]).names == ("l1", "l2", "cube")


def test_add_a_disabled_penalty() -> None:
    assert PenaltyPipeline(["l1"]).add("l2", "l2", enabled=False).weights() == {"l1": 1.0}


@pytest.fixture
def events_seen() -> Iterator[list[tuple[Any, ...]]]:
    events: list[tuple[Any, ...]] = []
    names = ["steelyard.penalties.compute.start", "steelyard.penalties.compute.stop"]
    telemetry.attach_many(
        "test-penalties", names, lambda event, *rest: events.append((event, *rest[:2]))
    )
    yield events
    telemetry.detach("test-penalties")


def test_telemetry(events_seen: list[tuple[Any, ...]]) -> None:
    pipeline = PenaltyPipeline(["l1", "l2", cube]).set_enabled("l2", False)
    pipeline.compute_total(np.array(X))
    assert events_seen == []
    _, metrics = pipeline.compute(np.array(X))
    [start, stop] = events_seen
    assert start[0] == "steelyard.penalties.compute.start"
    assert start[1].keys() == {"system_time"}
    assert start[2] == {"size": 2}
    assert stop[0] == "steelyard.penalties.compute.stop"
    assert stop[1].keys() == {"duration", "total"}
    assert stop[1]["duration"] >= 0
    assert stop[1]["total"] == metrics["total"]
    assert stop[2] == {"metrics": metrics}


KNOWN = "'l1', 'l2', 'elastic_net', 'kl', 'js', 'entropy', 'orthogonality', 'consistency', 'out"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (["l3"], f"penalty must be one of {KNOWN}"),
        (["l1", "l1"], "got 'l1', whose metric 'l1' is taken; there are: 'l1'. Set the option 'na"),
        ([("l1", {"name": "total"})], "got 'total', whose metric 'total' is taken; there are: no"),
        (["l1", ("l2", {"name": "l1_weighted"})], "whose metric 'l1_weighted' is taken"),
        ([("l1", {"weight": math.nan})], "weight of penalty 'l1' must be a finite number, got nan"),
        ([("l1", {"weight": "1"})], "weight of penalty 'l1' must be a finite number, got '1'"),
        ([("l1", {"wieght": 1.0})], "the options 'wieght': got an unexpected keyword argument"),
        ([("l1", {"fn": 1.0})], "the options 'fn': got an unexpected keyword argument 'fn'"),
        (["kl"], "'kl' cannot be called with the inputs 'x' and the options none: missing a requi"),
        ([("kl", {"inputs": ("a",)})], "with the inputs 'a' and the options none: missing a requi"),
        ([("l1", {"inputs": ()})], "inputs of penalty 'l1' must be one or more names, got ()"),
        ([("l1", {"inputs": (1,)})], "inputs of penalty 'l1' must be one or more names, got (1,)"),
        ([("l1", {"inputs": 1})], "inputs of penalty 'l1' must be one or more names, got 1"),
        ([("l1", {"name": ""})], "name must be a non-empty string, got ''"),
        ([("l1", {"differentiable": 1})], "differentiable must be True or False, got 1"),
        (
            [("l1", {"gradient": "none", "differentiable": True})],
            "gradient='none' and differentiable=True of penalty 'l1' contradict each other",
        ),
        (
            [("l1", {"gradient": "autograd", "differentiable": False})],
            "gradient='autograd' and differentiable=False of penalty 'l1' contradict each other",
        ),
        (
            [("l1", {"gradient": "score"})],
            "gradient must be one of 'auto', 'autograd', 'none', got 'score'",
        ),
        ([("l1", {"wieght": 1.0})], "its options are 'scale', 'reduction', 'mask'. Name the arr"),
        ([("l1", {"enabled": None})], "enabled must be True or False, got None"),
        ([lambda x: x], "a penalty needs a name, got <function <lambda>"),
        ([functools.partial(l1, scale=2.0)], "a penalty needs a name, got functools.partial"),
        ([("l1", 0.5)], "a penalty must be a name, a callable, or a pair"),
        ([("l1",)], "a penalty must be a name, a callable, or a pair"),
        ([3], "a penalty must be a name, a callable, or a pair (name or callable, {options}), got"),
    ],
)
def test_invalid_pipelines(terms: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        PenaltyPipeline(terms)
    assert message in str(caught.value)


def test_invalid_updates() -> None:
    pipeline = PenaltyPipeline(["l1", "l2"])
    updates: list[Callable[[], object]] = [
        lambda: pipeline.remove("l3"),
        lambda: pipeline.update_weight("l3", 1.0),
        lambda: pipeline.set_enabled("l3", True),
    ]
    for update in updates:
        with pytest.raises(InputError, match=r"no penalty is called 'l3'; there are: 'l1', 'l2'"):
            update()
    with pytest.raises(
        InputError, match=r"weight of penalty 'l1' must be a finite number, got inf"
    ):
        pipeline.update_weight("l1", math.inf)
    with pytest.raises(InputError, match=r"enabled must be True or False, got 0"):
        pipeline.set_enabled("l1", 0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"fn of penalty 'x' must be a name or a callable, got 3"):
        pipeline.add("x", 3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"whose metric 'l2' is taken; there are: 'l1', 'l2'"):
        pipeline.add("l2", cube)


def test_invalid_calls(backend: Backend) -> None:
    x = backend.array(X)
    named = PenaltyPipeline([("kl", {"inputs": ("student", "teacher")})])
    with pytest.raises(InputError, match=r"needs the input 'teacher', got 'student', 'reference'"):
        named.compute({"student": x, "reference": x})
    with pytest.raises(InputError, match=r"reads the inputs 'student', 'teacher', got one array"):
        named.compute(x)
    with pytest.raises(InputError, match=r"'l1' must say which inputs it reads.* the call has 'a'"):
        PenaltyPipeline(["l1"]).compute({"a": x})
    with pytest.raises(InputError, match=r"'l1' must give a scalar, got shape \(2,\); reduce it"):
        PenaltyPipeline([("l1", {"reduction": "none"})]).compute(x)
    with pytest.raises(InputError, match=r"track_grad_norms must be True or False, got 'yes'"):
        PenaltyPipeline(["l1"]).compute(x, track_grad_norms="yes")  # type: ignore[arg-type]
