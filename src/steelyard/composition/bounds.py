"""Multipliers of bounded terms: a controller holds the value of a term at its bound.

The weight of a term with a bound rises while the value breaks the bound, and falls while it keeps
it. It has two parts: a factor that reacts to the value of this call, and a gain G that moves once
per optimizer step. KP and KI below are their constants kp and ki.

With the value v of a term, its bound b and the scale s (|b| unless given), the error is

    e = (v - b) / s  for `at_most`,   e = (b - v) / s  for `at_least`:

positive where the bound is violated. The multiplier of a call, its weight in the loss, is

    λ = unit · G · max(0, 1 + kp clip(e, -1, 1))   with   unit = size of the base loss / s,

and after each optimizer step, with ē the mean over its calls of clip(e, -3, 3),

    G ← G exp(ki ē), within limits;  where λ is 0 within the bound, only down to the first G.

The unit makes the controller blind to scale: if the term and its bound are multiplied by c, or the
base loss is a sum instead of a mean, λ · term keeps its ratio to the base loss.

The factor 1 + kp e reads the value of this very call; with one step of delay a tight bound swings.
It makes the term a penalty that stiffens around its bound: 0 up to the distance s / kp within it,
G at the bound, and 1 + kp times that at twice the bound and beyond. Its clip is for heavy tails:
a batch far beyond the bound has a large gradient anyway, and its weight must not grow too.

The gain G is the weight that the bound needs in the end, in units. That is not known within an
order of magnitude, so it is found by factors. It rests where the mean of ē is 0; clipped as the
factor's error is, batches at 2 and at 4 times the bound would count alike, and the mean of values
with a heavy tail would rest above the bound. It moves slowly beside the factor: with ki = 0.3 a
value without noise swings between half and one and a half times its bound. It is not lowered
further while a value is within the bound without any weight of the term (anti-windup).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from steelyard.errors import StateError
from steelyard.spec.checks import is_finite
from steelyard.spec.protocol import Stateful
from steelyard.spec.weights import Bound

KP, KI = 3.0, 0.1
GAIN, SMALLEST_GAIN, LARGEST_GAIN = 0.05, 0.001, 10.0  # the first one, and its limits
_LARGEST_ERROR = 3.0  # in the mean that moves the gain
_STEPS_FOR_SIZE = 5  # optimizer steps after which the size of the base loss is fixed
_NEAR_ZERO = 0.01  # a base loss below this fraction of its gradient's size is near 0
_KEYS_OF_0_2_0 = frozenset(
    {"integral", "step", "error_sum", "calls", "size_sum", "sizes", "steps", "unmet_steps"}
)


@dataclass
class Multiplier:
    """State of the controller of one bounded term.

    Attributes:
        gain: G.
        step: number of the current optimizer step; None before the first call.
        error_sum: sum of the errors of the calls of this step.
        weight_sum: sum of their multipliers.
        calls: number of these calls.
        size_sum: sum of the sizes of the base loss, until they are fixed.
        sizes: number of these sizes.
        steps: number of optimizer steps completed.
    """

    gain: float = GAIN
    step: int | None = None
    error_sum: float = 0.0
    weight_sum: float = 0.0
    calls: int = 0
    size_sum: float = 0.0
    sizes: int = 0
    steps: int = 0

    @property
    def needs_size(self) -> bool:
        """Whether the size of the base loss is still measured."""
        return self.steps < _STEPS_FOR_SIZE

    def begin_step(self, step: int) -> None:
        """Complete the step before, if `step` is another."""
        if step == self.step:
            return
        if self.calls:
            error = self.error_sum / self.calls
            # A value that is within its bound by itself says nothing about the gain it needs there.
            is_idle = error < 0 and self.weight_sum == 0
            smallest = min(self.gain, GAIN) if is_idle else SMALLEST_GAIN
            self.gain = min(max(smallest, self.gain * math.exp(KI * error)), LARGEST_GAIN)
            self.steps += 1
        self.step, self.calls = step, 0
        self.error_sum = self.weight_sum = 0.0

    def weight(self, bound: Bound, value: float, size: float | None) -> float:
        """Multiplier of a call, without its sign; counts its error for this step.

        Args:
            bound: at this step.
            value: of the term.
            size: of the base loss; None once it is fixed.
        """
        if size is not None:
            self.size_sum += size
            self.sizes += 1
        unit = self.size_sum / self.sizes / bound.scale
        error = bound.error(value)
        if not math.isfinite(error):
            return unit * self.gain
        weight = unit * self.gain * max(0.0, 1 + KP * _clipped(error, 1.0))
        self.error_sum += _clipped(error, _LARGEST_ERROR)
        self.weight_sum += weight
        self.calls += 1
        return weight

    def state_dict(self) -> dict[str, Any]:
        """State to save."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, here or in version 0.2.0.

        Raises:
            StateError: it is not that.
        """
        if isinstance(state, Mapping) and set(state) == _KEYS_OF_0_2_0:
            # Its multiplier at the bound was unit · integral, 0 before the first violation.
            old = {key: state[key] for key in ("step", "size_sum", "sizes", "steps")}
            state = Multiplier(gain=state["integral"] or GAIN).state_dict() | old
        known = {field.name for field in fields(self)}
        # A state may also count the steps far beyond the bound, which decide nothing.
        valid = isinstance(state, Mapping) and set(state) - {"far_steps"} == known
        if not valid or not all(
            is_finite(value) or (key == "step" and value is None) for key, value in state.items()
        ):
            raise StateError(
                f"the state of a bound must hold numbers for {sorted(known)}, got {state!r}."
            )
        for key in known:
            setattr(self, key, state[key])


@dataclass(frozen=True, eq=False)
class BoundedState:
    """State of a bounded term: of its multiplier, and of the term itself if it has one."""

    multiplier: Multiplier
    term: Stateful | None

    def state_dict(self) -> dict[str, Any]:
        """State to save."""
        own = None if self.term is None else self.term.state_dict()
        return {"multiplier": self.multiplier.state_dict(), "term": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            StateError: it is not that.
        """
        if not isinstance(state, Mapping) or set(state) != {"multiplier", "term"}:
            raise StateError(
                f"the state of a bounded term must hold 'multiplier' and 'term', got {state!r}."
            )
        self.multiplier.load_state_dict(state["multiplier"])
        if self.term is not None:
            self.term.load_state_dict(state["term"])


def _clipped(number: float, limit: float) -> float:
    return min(max(-limit, number), limit)


def size_of_base(value: float, gradient_size: float) -> float:
    """Size of a base loss: that of its value, or of its gradient where the value is near 0.

    In reinforcement learning advantages cancel: the value is about 0, the gradient is not.

    Args:
        value: of the base loss.
        gradient_size: Σ |∂ base / ∂ input|, by how much it changes if every input moves by 1.
    """
    near_zero = abs(value) < _NEAR_ZERO * gradient_size
    size = gradient_size if near_zero else abs(value)
    return size if math.isfinite(size) and size > 0 else 1.0
