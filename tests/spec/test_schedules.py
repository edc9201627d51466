from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steelyard
from steelyard.errors import SpecError
from steelyard.spec import schedules
from steelyard.spec.schedules import (
    by_epoch,
    constant,
    cosine,
    exponential,
    join,
    linear,
    piecewise,
    warmup,
)

Schedule = Callable[[int], float]

weights = st.floats(0.0, 1e6)
lengths = st.integers(0, 1000)
steps = st.integers(0, 3000)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (constant(0.3), {0: 0.3, 1: 0.3, 10**9: 0.3}),
        (linear(1.0, 3.0, 4), {0: 1.0, 1: 1.5, 2: 2.0, 3: 2.5, 4: 3.0, 5: 3.0, 10**9: 3.0}),
        (linear(3.0, 1.0, 4), {0: 3.0, 1: 2.5, 4: 1.0, 9: 1.0}),
        (linear(1.0, 3.0, 0), {0: 3.0, 1: 3.0}),
        (linear(1.0, 3.0, 1), {0: 1.0, 1: 3.0}),
        (warmup(0.8, 4), {0: 0.0, 1: 0.2, 3: 0.6, 4: 0.8, 100: 0.8}),
        (warmup(0.8, 0), {0: 0.8}),
        (exponential(2.0, 0.5), {0: 2.0, 1: 1.0, 2: 0.5, 10: 2.0**-9}),
        (exponential(2.0, 3.0), {0: 2.0, 2: 18.0, 1000: math.inf}),
        (exponential(-2.0, 3.0), {0: -2.0, 1000: -math.inf}),
        (exponential(2.0, 0.0), {0: 2.0, 1: 0.0}),
        # cos(0), cos(pi/3) = 1/2, cos(pi/2) = 0, cos(2pi/3) = -1/2, cos(pi) = -1
        (cosine(5.0, 1.0, 6), {0: 5.0, 2: 4.0, 3: 3.0, 4: 2.0, 6: 1.0, 7: 1.0}),
        (cosine(0.0, 1.0, 4), {0: 0.0, 1: (2 - math.sqrt(2)) / 4, 2: 0.5, 4: 1.0}),
        (cosine(5.0, 1.0, 0), {0: 1.0, 9: 1.0}),
        (piecewise({0: 0.1, 100: 0.5}), {0: 0.1, 99: 0.1, 100: 0.5, 101: 0.5, 10**9: 0.5}),
        (
            by_epoch(piecewise({0: 1.0, 1: 2.0, 2: 5.0}), 3),
            {0: 1.0, 2: 1.0, 3: 2.0, 5: 2.0, 6: 5.0},
        ),
        (by_epoch(linear(0.0, 1.0, 2), 1), {0: 0.0, 1: 0.5, 2: 1.0}),
        (
            join({3: linear(5.0, 1.0, 4), 0: warmup(6.0, 3)}),
            {0: 0.0, 1: 2.0, 2: 4.0, 3: 5.0, 4: 4.0, 7: 1.0, 99: 1.0},
        ),
        (join({0: exponential(2.0, 3.0), 2: constant(1.0)}), {1: 6.0, 2: 1.0, 10**6: 1.0}),
        (piecewise({7: 3.0, 0: 1.0, 3: 2.0}), {0: 1.0, 2: 1.0, 3: 2.0, 6: 2.0, 7: 3.0}),
    ],
)
def test_values_by_hand(schedule: Schedule, expected: dict[int, float]) -> None:
    assert {step: schedule(step) for step in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("make", [linear, cosine])
@given(start=weights, end=weights, length=lengths, step=steps)
def test_a_ramp_stays_between_its_ends_and_never_turns_back(
    make: Callable[[float, float, int], Schedule], start: float, end: float, length: int, step: int
) -> None:
    ramp = make(start, end, length)
    here, after = ramp(step), ramp(step + 1)
    slack = 1e-12 * max(start, end)
    assert min(start, end) - slack <= here <= max(start, end) + slack
    assert (after - here) * (1 if end >= start else -1) >= -slack
    assert here >= 0  # exactly: rounding must not make a weight that the spec refuses


@pytest.mark.parametrize("make", [linear, cosine])
@given(start=weights, end=weights, length=lengths)
def test_a_ramp_joins_its_ends_and_its_halves_mirror(
    make: Callable[[float, float, int], Schedule], start: float, end: float, length: int
) -> None:
    ramp = make(start, end, length)
    assert ramp(length) == pytest.approx(end, abs=1e-9)
    if length:
        assert ramp(0) == pytest.approx(start, abs=1e-9)
        quarter = length // 4
        assert ramp(quarter) + ramp(length - quarter) == pytest.approx(start + end, rel=1e-9)


@given(v=weights, length=lengths, step=steps)
def test_warmup_is_a_line_from_zero(v: float, length: int, step: int) -> None:
    assert warmup(v, length)(step) == linear(0.0, v, length)(step)
    assert warmup(v, length)(step) == pytest.approx(
        v * (min(step / length, 1) if length else 1), rel=1e-12
    )


@given(v=weights, rate=st.floats(0.0, 2.0), step=st.integers(0, 100))
def test_exponential_multiplies_by_its_rate(v: float, rate: float, step: int) -> None:
    schedule = exponential(v, rate)
    assert schedule(0) == v
    assert schedule(step + 1) == pytest.approx(rate * schedule(step), rel=1e-9, abs=1e-300)


@given(pieces=st.dictionaries(st.integers(1, 50), weights), first=weights, step=st.integers(0, 60))
def test_piecewise_is_the_last_piece_that_has_begun(
    pieces: dict[int, float], first: float, step: int
) -> None:
    pieces = {**pieces, 0: first}
    begun = max(begin for begin in pieces if begin <= step)
    assert piecewise(pieces)(step) == pieces[begun]


def test_piecewise_keeps_its_own_copy() -> None:
    pieces = {0: 1.0}
    schedule = piecewise(pieces)
    pieces[0] = 2.0
    assert schedule(0) == 1.0


NUMBER = "{} must be a finite number, got {}."
STEPS = "{} must be a whole number >= 0, got {}."
EPOCH = "steps_per_epoch must be a whole number >= 1, got {}."
PIECES = "pieces must map steps to weights and begin at step 0, got {}."
JOIN = "pieces must map steps to schedules and begin at step 0, got {}."


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (constant, ("0.1",), NUMBER.format("v", "'0.1'")),
        (constant, (None,), NUMBER.format("v", "None")),
        (constant, (True,), NUMBER.format("v", "True")),
        (constant, (math.nan,), NUMBER.format("v", "nan")),
        (linear, (math.inf, 1.0, 3), NUMBER.format("start", "inf")),
        (linear, (0.0, -math.inf, 3), NUMBER.format("end", "-inf")),
        (linear, (0.0, 1.0, -1), STEPS.format("steps", "-1")),
        (linear, (0.0, 1.0, 2.0), STEPS.format("steps", "2.0")),
        (linear, (0.0, 1.0, True), STEPS.format("steps", "True")),
        (warmup, ("v", 3), NUMBER.format("v", "'v'")),
        (warmup, (1.0, None), STEPS.format("steps", "None")),
        (exponential, (None, 0.5), NUMBER.format("v", "None")),
        (exponential, (1.0, math.nan), NUMBER.format("rate", "nan")),
        (cosine, (None, 0.0, 3), NUMBER.format("start", "None")),
        (cosine, (1.0, "0", 3), NUMBER.format("end", "'0'")),
        (cosine, (1.0, 0.0, -3), STEPS.format("steps", "-3")),
        (piecewise, ({},), PIECES.format("{}")),
        (piecewise, ({1: 0.5},), PIECES.format("{1: 0.5}")),
        (piecewise, ([0, 1],), PIECES.format("[0, 1]")),
        (piecewise, ({0: 1.0, -5: 2.0},), STEPS.format("a step of pieces", "-5")),
        (piecewise, ({0: 1.0, 1.5: 2.0},), STEPS.format("a step of pieces", "1.5")),
        (by_epoch, (0.5, 3), "schedule must be a callable epoch -> float, got 0.5."),
        (by_epoch, (constant(1.0), 0), EPOCH.format("0")),
        (by_epoch, (constant(1.0), 2.5), EPOCH.format("2.5")),
        (join, ({},), JOIN.format("{}")),
        (join, (3,), JOIN.format("3")),
        (join, ({0: constant(1.0), -1: constant(1.0)},), STEPS.format("a step of pieces", "-1")),
        (join, ({0: 0.5},), "pieces[0] must be a callable step -> float, got 0.5."),
        (piecewise, ({0: 1.0, 9: "x"},), NUMBER.format("pieces[9]", "'x'")),
    ],
)
def test_a_bad_argument_is_refused_when_the_schedule_is_made(
    make: Callable[..., Schedule], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(*arguments)
    assert str(caught.value) == message


EACH: list[tuple[Callable[..., Schedule], tuple[Any, ...], tuple[Any, ...]]] = [
    (constant, (0.1,), (0.2,)),
    (linear, (0.0, 1.0, 10), (0.0, 1.0, 11)),
    (warmup, (1.0, 10), (2.0, 10)),
    (exponential, (1.0, 0.9), (1.0, 0.8)),
    (cosine, (1.0, 0.0, 10), (1.0, 0.1, 10)),
    (piecewise, ({0: 1.0, 5: 2.0},), ({0: 1.0, 6: 2.0},)),
    (by_epoch, (linear(0.0, 1.0, 9), 2), (linear(0.0, 1.0, 9), 3)),
    (join, ({0: warmup(1.0, 4)},), ({0: warmup(1.0, 5)},)),
]


@pytest.mark.parametrize(("make", "arguments", "others"), EACH)
def test_schedules_compare_hash_and_pickle_by_value(
    make: Callable[..., Schedule], arguments: tuple[Any, ...], others: tuple[Any, ...]
) -> None:
    schedule, same, other = make(*arguments), make(*arguments), make(*others)
    assert schedule == same
    assert hash(schedule) == hash(same)
    assert schedule != other
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        twin = pickle.loads(pickle.dumps(schedule, protocol))
        assert twin == schedule
        assert twin(4) == schedule(4)


TRACEABLE: list[Schedule] = [
    constant(0.3),
    linear(0.25, 3.0, 7),
    linear(0.25, 3.0, 0),
    warmup(0.8, 5),
    exponential(2.0, 0.999),
    exponential(2.0, 1.01),
    exponential(2.0, 0.0),
    exponential(2.0, -0.5),
    exponential(0.0, 2.0),
    cosine(5.0, 1.0, 6),
    cosine(5.0, 1.0, 0),
    piecewise({0: 0.1}),
    piecewise({0: 0.1, 3: 0.5, 7: -1.0}),
    join({0: warmup(1.0, 3), 3: cosine(1.0, 0.1, 6)}),
    join({0: exponential(1.0, 1.5), 6: constant(2.0)}),
    by_epoch(linear(0.0, 1.0, 5), 3),
    by_epoch(piecewise({0: 1.0, 1: 2.0, 2: 5.0}), 3),
]
WHERE: dict[str, Callable[[Schedule, int], Any]] = {
    "jit": lambda schedule, step: jax.jit(schedule)(step),
    "jax": lambda schedule, step: schedule(jnp.asarray(step)),  # type: ignore[arg-type]
    "numpy": lambda schedule, step: schedule(np.asarray(step)),  # type: ignore[arg-type]
    "scalar": lambda schedule, step: schedule(np.int64(step)),  # type: ignore[arg-type]
    "torch": lambda schedule, step: schedule(torch.tensor(step)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("schedule", TRACEABLE, ids=repr)
def test_a_step_may_be_an_array_and_traced(schedule: Schedule, where: str) -> None:
    for step in (0, 1, 3, 6, 8, 1000):
        found, plain = WHERE[where](schedule, step), schedule(step)
        assert type(plain) is float
        assert np.shape(found) == ()
        assert float(found) == pytest.approx(plain, rel=1e-6, abs=1e-9)


def test_an_exponential_keeps_its_precision_in_float32() -> None:
    """The rate rounded to float32 and raised to the power would be off by 1e-4."""
    schedule = exponential(2.0, 0.999)
    exact = schedule(5000)
    assert float(jax.jit(schedule)(5000)) == pytest.approx(exact, rel=2e-6)
    assert float(np.float32(0.999) ** np.float32(5000)) * 2 != pytest.approx(exact, rel=2e-5)


def test_a_schedule_is_differentiable_by_its_step() -> None:
    assert float(jax.grad(linear(0.0, 1.0, 4))(2.0)) == 0.25


def test_kinds_do_not_equal_each_other() -> None:
    line: object = linear(1.0, 0.0, 10)
    assert line != cosine(1.0, 0.0, 10)


def test_the_order_of_the_pieces_does_not_matter() -> None:
    assert piecewise({0: 1.0, 5: 2.0}) == piecewise({5: 2.0, 0: 1.0})


def test_users_find_every_schedule_at_the_top_level() -> None:
    for name in steelyard.schedules.__all__:
        assert getattr(steelyard.schedules, name) is getattr(schedules, name)
    assert {make.__name__ for make, _, _ in EACH} == set(steelyard.schedules.__all__)


def test_a_zero_stays_zero_and_a_sign_is_kept_where_floats_overflow() -> None:
    assert schedules.exponential(0.0, 2.0)(5000) == 0.0
    assert schedules.exponential(1.0, -2.0)(5001) == -math.inf
    assert schedules.exponential(1.0, -2.0)(5000) == math.inf
