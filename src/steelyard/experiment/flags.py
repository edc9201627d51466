"""The one rule for what in the numbers of a term asks for a second look.

The live display applies it to the numbers of a step, the report to those of a whole run.
"""

from __future__ import annotations

DOMINATES, FIGHTS, NO_GRADIENT = "dominates", "fights the base loss", "no gradient"
FLAGS = (DOMINATES, FIGHTS, NO_GRADIENT)  # the order in which they are shown

_LARGE_SHARE = 0.5  # more than all others together
_OPPOSING_COSINE = -0.3


def flags_of(
    *,
    tracked: bool,
    weight: float,
    grad_norm: float | None,
    share: float | None,
    cosine: float | None,
) -> tuple[str, ...]:
    """Flags of a term, in the order of `FLAGS`.

    | tracked | `grad_norm` | `weight` | `share` | `cosine` | flags |
    |---|---|---|---|---|---|
    | no | any | any | any | any | none: nothing is known of its gradient |
    | yes | None or 0 | any | any | any | no gradient |
    | yes | not 0 | 0 | any | any | none: its gradient reaches nothing, as was asked for |
    | yes | not 0 | not 0 | > 0.5 | ≥ -0.3 or None | dominates |
    | yes | not 0 | not 0 | ≤ 0.5 or None | < -0.3 | fights the base loss |
    | yes | not 0 | not 0 | > 0.5 | < -0.3 | dominates, fights the base loss |
    | yes | not 0 | not 0 | ≤ 0.5 or None | ≥ -0.3 or None | none |

    A gradient of 0 at one step is no fault: a term may have reached its optimum, or not have
    left it yet. The flag then says so of that step; the report has it if all steps were so.

    Args:
        tracked: whether gradient norms were tracked where the term ran.
        weight: of the term.
        grad_norm: norm of its gradient before the weight; None if it has none.
        share: its part in the sum of the norms of all weighted gradients.
        cosine: of its gradient to that of the base loss.

    Example:
        >>> flags_of(tracked=True, weight=0.1, grad_norm=8.0, share=0.7, cosine=-0.5)
        ('dominates', 'fights the base loss')
    """
    if not tracked:
        return ()
    if not grad_norm:
        return (NO_GRADIENT,)
    if not weight:
        return ()
    found = {
        DOMINATES: share is not None and share > _LARGE_SHARE,
        FIGHTS: cosine is not None and cosine < _OPPOSING_COSINE,
    }
    return tuple(flag for flag, there in found.items() if there)
