"""Weight schedules: `step -> float`, steps counted from 0.

Each is a small frozen object, so it pickles, compares and prints. A schedule may yield any
number; the pipeline refuses a negative or non-finite weight at the step where it occurs.

A step may also be a NumPy, torch or JAX array without axes, traced by `jax.jit` or
`torch.compile` or not: the weight is then such an array, in its library's default precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.errors import SpecError
from steelyard.spec.checks import is_array, is_finite, is_whole


# `Any`: a whole number gives a float, an array without axes gives another one.
@dataclass(frozen=True)
class _Constant:
    v: float

    def __call__(self, step: Any) -> Any:  # noqa: ARG002 - every schedule takes the step
        return self.v


@dataclass(frozen=True)
class _Linear:
    start: float
    end: float
    steps: int

    def __call__(self, step: Any) -> Any:
        return self.start + (self.end - self.start) * _progress(step, self.steps)


@dataclass(frozen=True)
class _Exponential:
    v: float
    rate: float

    def __call__(self, step: Any) -> Any:
        if self.v == 0:
            return 0.0
        if is_array(step) and self.rate > 0:
            # rate ** step would raise the rounded rate to that power: off by step times as much.
            return self.v * _elementwise("exp", step * math.log(self.rate))
        try:
            return self.v * self.rate**step
        except OverflowError:
            sign = -1.0 if self.rate < 0 and step % 2 else 1.0
            return math.copysign(math.inf, self.v * sign)


@dataclass(frozen=True)
class _Cosine:
    start: float
    end: float
    steps: int

    def __call__(self, step: Any) -> Any:
        falling = (1 + _elementwise("cos", math.pi * _progress(step, self.steps))) / 2
        return self.end + (self.start - self.end) * falling


@dataclass(frozen=True)
class _Piecewise:
    pieces: tuple[tuple[int, float], ...]

    def __call__(self, step: Any) -> Any:
        value = self.pieces[0][1]
        for begin, other in self.pieces[1:]:
            # A choice without a branch, which a traced step could not take.
            value = other * (step >= begin) + value * (step < begin)
        return value


@dataclass(frozen=True)
class _Join:
    pieces: tuple[tuple[int, Callable[[Any], Any]], ...]

    def __call__(self, step: Any) -> Any:
        if not is_array(step):
            begin, schedule = [piece for piece in self.pieces if piece[0] <= step][-1]
            return schedule(step - begin)
        # All pieces are computed, since a traced step cannot take a branch. A piece that has not
        # begun stays at its step 0 and one that has ended at its end: far beyond it an exponential
        # may be infinite, and infinity times 0 is NaN.
        ends = [begin for begin, _ in self.pieces[1:]]
        value: Any = 0.0
        for (begin, schedule), end in zip(self.pieces, [*ends, None], strict=True):
            own = (step - begin).clip(min=0)
            piece = schedule(own if end is None else own.clip(max=end - begin))
            value = piece * (step >= begin) + value * (step < begin)
        return value


@dataclass(frozen=True)
class _ByEpoch:
    schedule: Callable[[Any], Any]
    steps_per_epoch: int

    def __call__(self, step: Any) -> Any:
        return self.schedule(step // self.steps_per_epoch)


def by_epoch(schedule: Callable[[int], float], steps_per_epoch: int) -> _ByEpoch:
    """A schedule that counts epochs, for those who count steps: schedule(step // steps_per_epoch).

    Example:
        >>> weight = by_epoch(linear(0.0, 1.0, 4), steps_per_epoch=100)
        >>> [weight(step) for step in (0, 99, 100, 250, 400)]
        [0.0, 0.0, 0.25, 0.5, 1.0]
    """
    if not callable(schedule):
        raise SpecError(f"schedule must be a callable epoch -> float, got {schedule!r}.")
    if not is_whole(steps_per_epoch, at_least=1):
        raise SpecError(f"steps_per_epoch must be a whole number >= 1, got {steps_per_epoch!r}.")
    return _ByEpoch(schedule, int(steps_per_epoch))


def constant(v: float) -> _Constant:
    """Always `v`.

    Example:
        >>> constant(0.1)(7)
        0.1
    """
    return _Constant(_number("v", v))


def linear(start: float, end: float, steps: int) -> _Linear:
    """From `start` to `end` in a straight line: start + (end - start) * min(step / steps, 1).

    With `steps=0` the end value holds at once.

    Example:
        >>> [linear(0.0, 1.0, 4)(step) for step in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """
    return _Linear(_number("start", start), _number("end", end), _steps(steps))


def warmup(v: float, steps: int) -> _Linear:
    """From 0 to `v` in a straight line: v * min(step / steps, 1).

    Example:
        >>> [warmup(0.5, 10)(step) for step in (0, 5, 20)]
        [0.0, 0.25, 0.5]
    """
    return _Linear(0.0, _number("v", v), _steps(steps))


def exponential(v: float, rate: float) -> _Exponential:
    """Multiplied by `rate` at every step: v * rate ** step.

    Example:
        >>> [exponential(1.0, 0.5)(step) for step in (0, 1, 3)]
        [1.0, 0.5, 0.125]
    """
    return _Exponential(_number("v", v), _number("rate", rate))


def cosine(start: float, end: float, steps: int) -> _Cosine:
    """From `start` to `end` along half a cosine.

    end + (start - end) * (1 + cos(pi * min(step / steps, 1))) / 2; with `steps=0` the end
    value holds at once.

    Example:
        >>> [round(cosine(1.0, 0.0, 4)(step), 3) for step in (0, 1, 2, 4, 8)]
        [1.0, 0.854, 0.5, 0.0, 0.0]
    """
    return _Cosine(_number("start", start), _number("end", end), _steps(steps))


def piecewise(pieces: Mapping[int, float]) -> _Piecewise:
    """The value of the last piece that has begun.

    Example:
        >>> [piecewise({0: 0.1, 100: 0.5})(step) for step in (0, 99, 100)]
        [0.1, 0.1, 0.5]
    """
    if not isinstance(pieces, Mapping) or 0 not in pieces:
        raise SpecError(f"pieces must map steps to weights and begin at step 0, got {pieces!r}.")
    for step in pieces:
        _steps(step, name="a step of pieces")
    values = {step: _number(f"pieces[{step}]", v) for step, v in pieces.items()}
    return _Piecewise(tuple(sorted(values.items())))


def join(pieces: Mapping[int, Callable[[int], float]]) -> _Join:
    """The schedule of the last piece that has begun; each counts its steps from its beginning.

    A warm-up and then a decay: `join({0: warmup(v, 10), 10: cosine(v, 0.0, 90)})`.

    Example:
        >>> rate = join({0: warmup(1.0, 4), 4: linear(1.0, 0.0, 2)})
        >>> [rate(step) for step in (0, 2, 4, 5, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if not isinstance(pieces, Mapping) or 0 not in pieces:
        raise SpecError(f"pieces must map steps to schedules and begin at step 0, got {pieces!r}.")
    for step, schedule in pieces.items():
        _steps(step, name="a step of pieces")
        if not callable(schedule):
            raise SpecError(f"pieces[{step}] must be a callable step -> float, got {schedule!r}.")
    return _Join(tuple(sorted(pieces.items(), key=lambda piece: piece[0])))


def _progress(step: Any, steps: int) -> Any:
    if not steps:
        return 1.0
    share = step / steps
    return share.clip(max=1.0) if is_array(share) else min(share, 1.0)


def _elementwise(function: str, x: Any) -> Any:
    """A function of `math`, for an array that of its library."""
    if not is_array(x):
        return getattr(math, function)(x)
    if hasattr(x, function):  # a tensor's method; Dynamo cannot trace what is below
        return getattr(x, function)()
    from array_api_compat import array_namespace  # noqa: PLC0415  # only ever reached with an array

    return getattr(array_namespace(x), function)(x)


def _number(name: str, value: float) -> float:
    if not is_finite(value):
        raise SpecError(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def _steps(value: int, name: str = "steps") -> int:
    if not is_whole(value, at_least=0):
        raise SpecError(f"{name} must be a whole number >= 0, got {value!r}.")
    return int(value)
