"""Constraints for Z3 from the arithmetic claims in the demo's answers."""

from __future__ import annotations

import re
from typing import Any

CLAIM = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")


def holds(datum: Any, index: int) -> list[Any]:  # noqa: ARG001 - signature of `constraints`
    """Constraint that the claim of a datum is true; an empty list for a datum without a claim.

    Reads from the datum's line: `claim` (optional), as `"17 + 25 = 42"`.

    Raises:
        ValueError: the claim is not of that form.

    Example:
        >>> from types import SimpleNamespace
        >>> import z3
        >>> (claim,) = holds(SimpleNamespace(record={"claim": "6 * 9 = 42"}), 0)
        >>> z3.simplify(claim)
        False
        >>> holds(SimpleNamespace(record={}), 0)
        []
    """
    import z3  # noqa: PLC0415 - an extra

    claim = datum.record.get("claim")
    if claim is None:
        return []
    match = CLAIM.fullmatch(claim)
    if match is None:
        raise ValueError(f"claim must be a sum such as '17 + 25 = 42', got {claim!r}.")
    left, sign, right, result = match.groups()
    a, b, c = (z3.IntVal(int(number)) for number in (left, right, result))
    return [{"+": a + b, "-": a - b, "*": a * b}[sign] == c]
