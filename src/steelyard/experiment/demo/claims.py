"""The sums that answers of the demo claim, as constraints for Z3."""

from __future__ import annotations

import re
from typing import Any

CLAIM = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")


def holds(datum: Any, index: int) -> list[Any]:  # noqa: ARG001 - what constraints are called with
    """That the claim of a datum is true; nothing for a datum without one.

    Reads from the datum's line: `claim` (optional), as `"17 + 25 = 42"`.

    Raises:
        ValueError: the claim is no sum.

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
    found = CLAIM.fullmatch(claim)
    if found is None:
        raise ValueError(f"claim must be a sum such as '17 + 25 = 42', got {claim!r}.")
    left, sign, right, result = found.groups()
    a, b, c = (z3.IntVal(int(number)) for number in (left, right, result))
    return [{"+": a + b, "-": a - b, "*": a * b}[sign] == c]
