"""Reward by logic: whether the constraints of an answer can be true together, decided by Z3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from steelyard._extras import require
from steelyard.regularizers.judges import verdict
from steelyard.spec import OptionChecks, title

_CHECKS = OptionChecks("reward")


@dataclass(frozen=True, kw_only=True)
class LogicCheck:
    """Reward an answer by Z3's verdict on its constraints: sat, unsat or unknown.

    The constraints that the function returns are asserted together. To reward a claim that follows
    from facts, assert the facts and the negation of the claim, and swap the rewards of `sat` and
    `unsat`.

    It runs in a process unless its entry says otherwise. Z3 does not always keep to its own time
    limit; the `timeout` of the reward kills the process. In threads, Z3 decides one answer at a
    time.

    Args:
        constraints: a function `(record, answer)`, or its `"package.module:attr"`, that returns a
            Z3 expression or a list of them. An empty list is satisfiable.
        solver_timeout: seconds that Z3 may take for one answer.
        sat: the reward if the constraints can be true together.
        unsat: the reward if they contradict each other.
        unknown: the reward if Z3 cannot decide.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: Z3 is not installed.

    Example:
        >>> import z3
        >>> def solves(record, answer):
        ...     x = z3.Int("x")
        ...     return [x == int(answer), x * x == record["square"]]
        >>> check = LogicCheck(constraints=solves)
        >>> check({"square": 9}, "-3"), check({"square": 9}, "4")
        (1.0, 0.0)
    """

    constraints: Callable[[Mapping[str, Any], str], Any]
    solver_timeout: float = 1.0
    sat: float = 1.0
    unsat: float = 0.0
    unknown: float = 0.0
    name: ClassVar[str] = "logic"
    run_in: ClassVar[str] = "process"

    def __post_init__(self) -> None:
        resolved = _CHECKS.function("constraints", self.constraints, self.name)
        object.__setattr__(self, "constraints", resolved)
        _CHECKS.positive("solver_timeout", self.solver_timeout, self.name)
        for option in ("sat", "unsat", "unknown"):
            _CHECKS.number(option, getattr(self, option), self.name)
        require("z3", title(self.name, "reward"))

    def __call__(self, record: Mapping[str, Any], answer: str) -> float:
        """Reward of an answer.

        Raises:
            InputError: its constraints are no Z3 expressions.
        """
        given = partial(self.constraints, record, answer)
        return float(getattr(self, verdict(given, self.solver_timeout, "an answer")))
