"""Base class of gradient transforms: a name, a filter of parameters, a scheduled strength."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor
from torch.optim import Optimizer

from steelyard.errors import SpecError
from steelyard.integrations.optim.param_lists import Slot, labels, select, slots_of
from steelyard.spec import is_finite

Schedule: TypeAlias = Callable[[int], float]
Where: TypeAlias = Callable[[Tensor], bool]


@dataclass(frozen=True, kw_only=True)
class Transform(ABC):
    """Changes gradients, or shrinks weights, before an optimizer steps.

    The functions of this package build transforms; a subclass with its own `apply` is one too.

    Attributes:
        name: Its name in messages and in the optimizer's `state_dict`.
        where: Selects the parameters, called with each; None: all of them.
    """

    name: str
    where: Where | None = None

    def __post_init__(self) -> None:
        if self.where is not None and not callable(self.where):
            raise SpecError(
                f"where must be a function of a parameter, got {self.where!r} ({self.name}): "
                "write for example where=lambda p: p.ndim > 1."
            )

    def check(self, optimizer: Optimizer) -> None:
        """Check, when it is attached, that it can work on this optimizer.

        Raises:
            SpecError: it cannot.
        """
        slots = slots_of(optimizer)
        if not select(slots, self.where):
            raise SpecError(
                f"where must choose a parameter, got none ({self.name}); there are: "
                f"{labels(slots)}."
            )

    @abstractmethod
    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:
        """Change the gradients in place.

        Args:
            slots: The selected parameters that have gradients.
            step: The number of steps the optimizer has made.
            first: False when a closure is evaluated again within one step.
        """


@dataclass(frozen=True)
class Strength:
    """A number >= 0, or a schedule `step -> float` of such numbers.

    Attributes:
        label: Its name in messages.
        given: The number or the schedule.
        above_zero: Whether 0 is not allowed.
    """

    label: str
    given: float | Schedule
    above_zero: bool = False

    def __post_init__(self) -> None:
        if not callable(self.given):
            self._checked(self.given, "")

    def at(self, step: int) -> float:
        """The number at `step`.

        Raises:
            SpecError: the schedule returns a number that is not allowed.
        """
        if not callable(self.given):
            return float(self.given)
        return self._checked(self.given(step), f" at step {step}")

    def _checked(self, value: float, when: str) -> float:
        rule = "> 0" if self.above_zero else ">= 0"
        if not is_finite(value) or value < 0 or (self.above_zero and value == 0):
            raise SpecError(
                f"{self.label} must be a finite number {rule}, or a schedule that gives such, "
                f"got {value!r}{when}."
            )
        return float(value)
