"""Multipliers of bounded terms: a PI controller holds the value of a term at its bound.

With the value v of a term, its bound b and the scale s (|b| unless given), the error is

    e = (v - b) / s  for `at_most`,   e = (b - v) / s  for `at_least`:

positive where the bound is violated. The multiplier of a call, its weight in the loss, is

    λ = unit · clip(kp e + I, 0, LIMIT)   with   unit = size of the base loss / s,

and after each optimizer step, with ē the mean error of its calls,

    I ← clip(I + ki ē, 0, LIMIT).

The unit makes the controller blind to scale: if the term and its bound are multiplied by c, or the
base loss is a sum instead of a mean, λ · term keeps its ratio to the base loss. The proportional
part reads the value of this very call; with one step of delay a tight bound swings. The clip of I
keeps it from growing while the multiplier cannot grow (anti-windup), and from turning negative.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from steelyard.errors import StateError
from steelyard.spec import Bound, Stateful, is_finite

KP, KI, LIMIT = 0.3, 0.02, 10.0
_STEPS_FOR_SIZE = 5  # optimizer steps after which the size of the base loss is fixed
_NEAR_ZERO = 0.01  # a base loss below this fraction of its gradient's size is near 0
_TOLERANCE, _PATIENCE = 0.05, 50  # relative violation, and for how many steps, that is reported


class UnmetBoundWarning(UserWarning):
    """A bound has been violated for many steps."""


@dataclass
class Multiplier:
    """State of the controller of one bounded term.

    Attributes:
        integral: I.
        step: number of the current optimizer step; None before the first call.
        error_sum: sum of the errors of the calls of this step.
        calls: number of these calls.
        size_sum: sum of the sizes of the base loss, until they are fixed.
        sizes: number of these sizes.
        steps: number of optimizer steps completed.
        unmet_steps: number of optimizer steps in a row at which the bound was violated.
    """

    integral: float = 0.0
    step: int | None = None
    error_sum: float = 0.0
    calls: int = 0
    size_sum: float = 0.0
    sizes: int = 0
    steps: int = 0
    unmet_steps: int = 0

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
            self.integral = _clip(self.integral + KI * error)
            self.unmet_steps = self.unmet_steps + 1 if error > _TOLERANCE else 0
            self.steps += 1
        self.step, self.error_sum, self.calls = step, 0.0, 0

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
            return unit * self.integral
        self.error_sum += error
        self.calls += 1
        return unit * _clip(KP * error + self.integral)

    def warn_if_unmet(self, name: str, bound: Bound, value: float) -> None:
        """Warn if the bound has been violated for many steps, and count them anew."""
        if self.unmet_steps < _PATIENCE:
            return
        self.unmet_steps = 0
        kind = "at_most" if bound.upper else "at_least"
        state = "at its limit" if self.integral >= LIMIT else "still rising"
        warnings.warn(
            f"{name} is at {value:.4g}, bound {kind} {bound.value:.4g}, for {_PATIENCE} steps: "
            f"multiplier {state}. Give it more steps or a smaller learning rate, or a bound that "
            f"can be met.",
            UnmetBoundWarning,
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """State to save."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            StateError: it is not that.
        """
        known = {each.name for each in fields(self)}
        valid = isinstance(state, Mapping) and set(state) == known
        if not valid or not all(
            is_finite(value) or (key == "step" and value is None) for key, value in state.items()
        ):
            raise StateError(
                f"the state of a bound must hold numbers for {sorted(known)}, got {state!r}."
            )
        for key, value in state.items():
            setattr(self, key, value)


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


def _clip(gain: float) -> float:
    return min(max(0.0, gain), LIMIT)
