"""The rule for weights, and schedules evaluated at steps that have values and that have none."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from steelyard.errors import InputError, SpecError
from steelyard.spec import schedules
from steelyard.spec.weights import check_weight, weight_at


@pytest.mark.parametrize("weight", [0, 0.5, np.float32(0.5), np.int64(3)])
def test_a_finite_number_is_a_weight(weight: Any) -> None:
    for found in (check_weight(weight, "a"), check_weight(-weight, "a", negative=True)):
        assert type(found) is float
        assert abs(found) == weight


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 10**400, "1", None, True, 1j])
def test_anything_else_is_none(weight: Any) -> None:
    with pytest.raises(SpecError) as caught:
        check_weight(weight, "a", " there")
    assert str(caught.value) == (
        f"weight must be a finite number >= 0, got {weight!r} there (regularizer 'a')."
    )
    with pytest.raises(InputError) as refused:
        check_weight(weight, "a", negative=True, kind="term")
    assert str(refused.value) == f"weight of term 'a' must be a finite number, got {weight!r}."


def test_only_penalties_may_weigh_less_than_nothing() -> None:
    assert check_weight(-0.1, "a", negative=True) == -0.1
    with pytest.raises(SpecError, match=r"weight must be a finite number >= 0, got -0\.1"):
        check_weight(-0.1, "a")


def falling(step: Any) -> Any:
    return 1.0 - step / 4


@pytest.mark.parametrize(
    "step",
    [2, np.int64(2), np.array(2), torch.tensor(2), jnp.asarray(2)],
    ids=["int", "scalar", "numpy", "torch", "jax"],
)
def test_a_step_that_has_a_value_gives_a_float(step: Any) -> None:
    assert weight_at(0.25, step, "a") == 0.25
    found = weight_at(falling, step, "a")
    assert type(found) is float
    assert found == 0.5


@pytest.mark.parametrize("step", [6, np.array(6), torch.tensor(6), jnp.asarray(6)])
def test_a_weight_that_has_a_value_is_checked(step: Any) -> None:
    with pytest.raises(SpecError) as caught:
        weight_at(lambda step: float(falling(step)), step, "a")
    assert str(caught.value) == (
        f"weight must be a finite number >= 0, got -0.5 at step {step} (regularizer 'a')."
    )
    with pytest.raises(SpecError, match=r">= 0, got .*-0\.5.* at step .*6"):
        weight_at(falling, step, "a")
    assert weight_at(falling, step, "a", negative=True) == -0.5
    with pytest.raises(InputError, match=r"weight of penalty 'a' must be a finite .* at step .*6"):
        weight_at(lambda step: step * math.inf, step, "a", negative=True)


@pytest.mark.parametrize("wrong", [None, "0.1", [0.1], True])
def test_a_schedule_that_gives_no_number(wrong: Any) -> None:
    with pytest.raises(SpecError, match=r"weight must be a finite number >= 0, got .* at step 3"):
        weight_at(lambda step: wrong, 3, "a")


@pytest.mark.parametrize("make", [np.ones, torch.ones, jnp.ones])
def test_a_schedule_that_gives_many_numbers(make: Any) -> None:
    with pytest.raises(
        SpecError, match=r"^the schedule of 'a' must give one number, got shape \(2"
    ):
        weight_at(lambda step: make(2), 3, "a")
    with pytest.raises(InputError, match=r"^the schedule of 'a' must give one number, got shape"):
        jax.jit(lambda step: weight_at(lambda s: s * jnp.ones(2), step, "a", negative=True))(1)


def test_a_schedule_that_raises() -> None:
    with pytest.raises(SpecError) as caught:
        weight_at(lambda step: 1 / step, 0, "a")
    assert str(caught.value) == (
        "weight must be a schedule that gives a number for every step, and it raised "
        "ZeroDivisionError: division by zero at step 0 (regularizer 'a')."
    )
    with pytest.raises(InputError, match=r"at step 0 \(term 'a'\)"):
        weight_at(lambda step: 1 / step, 0, "a", negative=True, kind="term")


def branching(step: Any) -> float:
    return 1.0 if step > 3 else 0.0


def test_a_schedule_that_cannot_be_traced() -> None:
    with pytest.raises(InputError) as caught:
        jax.jit(lambda step: weight_at(branching, step, "a", negative=True))(1)
    assert str(caught.value) == (
        f"the schedule of penalty 'a' must work on a traced step, and {branching!r} does not "
        "(TracerBoolConversionError): take one of steelyard.schedules or of optax "
        "(linear_schedule, cosine_decay_schedule, …), or write it with jax.numpy."
    )


def test_a_traced_weight_is_passed_on_unchecked() -> None:
    found = jax.jit(lambda step: weight_at(falling, step, "a"))(6)
    assert float(found) == -0.5
    with FakeTensorMode():
        assert weight_at(falling, torch.rand(()), "a").shape == ()

    def scaled(x: torch.Tensor, step: int) -> torch.Tensor:
        found: torch.Tensor = x * weight_at(falling, step, "a", negative=True)
        return found

    graph = make_fx(scaled, tracing_mode="symbolic")(torch.ones(2), 3)
    torch.testing.assert_close(graph(torch.ones(2), 6), torch.full((2,), -0.5))


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.constant(0.3),
        schedules.linear(0.1, 0.9, 7),
        schedules.cosine(0.9, 0.1, 7),
        schedules.exponential(0.9, 0.8),
        schedules.piecewise({0: 0.1, 3: 0.7}),
        schedules.by_epoch(schedules.linear(0.1, 0.9, 4), 2),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
@pytest.mark.parametrize("make", [int, torch.tensor], ids=["int", "tensor"])
def test_a_weight_inside_torch_compile(schedule: Any, make: Any) -> None:
    """Few graphs serve all steps: they follow the step, and do not hold one for each."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def scaled(x: torch.Tensor, step: Any) -> torch.Tensor:
        found: torch.Tensor = x * weight_at(schedule, step, "a")
        return found

    torch.compiler.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend=backend)
    for step in range(12):
        wanted = torch.full((2,), weight_at(schedule, step, "a"))
        torch.testing.assert_close(compiled(torch.ones(2), make(step)), wanted)
    assert len(graphs) <= 4
