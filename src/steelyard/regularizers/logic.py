"""Logical consistency of several answers: satisfiability of constraints, decided by Z3."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from steelyard._extras import require
from steelyard.errors import InputError
from steelyard.gradients.layout import LogProbs
from steelyard.regularizers import _options
from steelyard.spec.error_messages import title

# Z3's default context, in which users build their constraints, is not safe for threads: objects of
# it must not even be freed while another thread uses it.
_lock = threading.Lock()


def verdict(
    constraints: Callable[[], Any], seconds: float, where: str, *, datum: int | None = None
) -> str:
    """Decide whether constraints can be true together: `"sat"`, `"unsat"` or `"unknown"`.

    Args:
        constraints: a function without arguments that returns a Z3 expression or a list of them.
            An empty list is satisfiable.
        seconds: the time that Z3 may take.
        where: what the constraints belong to, for messages: `"datum 3"`.
        datum: index of the datum that they belong to, for errors.

    Raises:
        InputError: the function returned something else.

    Example:
        >>> import z3
        >>> verdict(lambda: [z3.Int("x") > 1, z3.Int("x") < 2], 1.0, "datum 0")
        'unsat'
    """
    with _lock:
        try:
            return _verdict(constraints, seconds, where, datum)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            raise


def _verdict(constraints: Callable[[], Any], seconds: float, where: str, datum: int | None) -> str:
    """As `verdict`; a function of its own, so that its Z3 objects are freed under the lock too."""
    import z3  # noqa: PLC0415 - an extra

    solver = z3.Solver()
    solver.set("timeout", max(1, round(1000 * seconds)))
    returned = constraints()
    # z3.parse_smt2_string returns an AstVector, which is not a Python sequence.
    several = isinstance(returned, list | tuple | z3.AstVector)
    for constraint in returned if several else [returned]:
        if not isinstance(constraint, bool | z3.BoolRef):
            raise InputError(
                f"the constraints of {where} must be Z3 expressions that are true or "
                f"false, one or a list of them, got {constraint!r}.",
                datum=datum,
            )
        solver.add(constraint)
    return str(solver.check())


@dataclass(frozen=True, kw_only=True)
class LogicalConsistency:
    """Penalise data whose constraints contradict each other, as decided by the SMT solver Z3.

    For each datum, the constraints that the function returns are asserted together. Z3's verdict,
    one of sat, unsat and unknown (undecidable for it, or out of time), selects the penalty of the
    datum; the verdicts are counted in the metrics. To check instead whether a claim follows from
    facts, assert the facts and the negation of the claim, and swap the penalties of `sat` and
    `unsat`.

    **The gradient is the score-function estimate**: unbiased for the expected penalty if the
    data were sampled from the model being trained; on fixed data it makes data with a
    contradiction less likely. The verdict itself has no gradient.

    It runs in a process unless its spec says otherwise. Z3 does not always keep to its own time
    limit; the term's `timeout` kills the process, and `on_error` decides whether the call fails
    or the term is skipped. A thread cannot be killed, and there terms with Z3 run one at a time.

    On fixed data a weight of 1 / (tokens of a datum) cancels what a mean of cross-entropy per token
    learns from a datum of penalty 1; a larger one makes it less likely without end.

    Reads from each datum: the fields that `constraints` reads; `weights` (optional), where 0
    leaves a token out of the gradient.

    Args:
        constraints: a function `(datum, index)`, or its `"package.module:attr"`, that returns a
            Z3 expression or a list of them. An empty list is satisfiable.
        solver_timeout: seconds Z3 may take for one datum.
        sat: the penalty of data whose constraints can be true together.
        unsat: the penalty of data whose constraints contradict each other.
        unknown: the penalty of data that Z3 cannot decide.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: Z3 is not installed.

    Example:
        >>> import z3
        >>> def ages(datum, index):
        ...     mother, child = z3.Ints("mother child")
        ...     return [mother == datum["mother"], child == datum["child"], mother > child + 12]
        >>> data = [{"mother": 40, "child": 9}, {"mother": 9, "child": 40}]
        >>> LogicalConsistency(constraints=ages).compute(data, [])
        ([0.0, 1.0], {'sat': 1.0, 'unsat': 1.0, 'unknown': 0.0})

    References:
        de Moura & Bjørner (2008), "Z3: an efficient SMT solver".
    """

    constraints: Callable[..., Any]
    solver_timeout: float = 1.0
    sat: float = 0.0
    unsat: float = 1.0
    unknown: float = 0.5
    name: ClassVar[str] = "logical_consistency"
    run_in: ClassVar[str] = "process"
    gradient: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        resolved = _options.function("constraints", self.constraints, self.name)
        object.__setattr__(self, "constraints", resolved)
        _options.positive("solver_timeout", self.solver_timeout, self.name)
        for option in ("sat", "unsat", "unknown"):
            _options.number(option, getattr(self, option), self.name)
        require("z3", title(self.name))

    def compute(
        self,
        data: Any,
        logprobs: LogProbs,  # noqa: ARG002 - the verdict does not depend on them
    ) -> tuple[list[float], dict[str, float]]:
        """Compute one penalty per datum; the numbers of data `sat`, `unsat` and `unknown`."""
        verdicts = [
            verdict(
                partial(self.constraints, datum, index),
                self.solver_timeout,
                f"datum {index}",
                datum=index,
            )
            for index, datum in enumerate(data)
        ]
        metrics = {kind: float(verdicts.count(kind)) for kind in ("sat", "unsat", "unknown")}
        return [float(getattr(self, answer)) for answer in verdicts], metrics
