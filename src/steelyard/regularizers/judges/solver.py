"""Satisfiability of constraints, decided by Z3."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from steelyard.errors import InputError

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
    given = constraints()
    # z3.parse_smt2_string returns an AstVector, which is not a Python sequence.
    several = isinstance(given, list | tuple | z3.AstVector)
    for constraint in given if several else [given]:
        if not isinstance(constraint, bool | z3.BoolRef):
            raise InputError(
                f"the constraints of {where} must be Z3 expressions that are true or "
                f"false, one or a list of them, got {constraint!r}.",
                datum=datum,
            )
        solver.add(constraint)
    return str(solver.check())
