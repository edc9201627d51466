"""Flags for conspicuous terms: dominating, opposing the base loss, or without a gradient.

The live display computes the flags from the metrics of a step, the report from those of a run.
"""

from __future__ import annotations

DOMINATES, FIGHTS, NO_GRADIENT = "dominates", "fights the base loss", "no gradient"
FLAGS = (DOMINATES, FIGHTS, NO_GRADIENT)  # the order in which they are shown

_LARGE_SHARE = 0.5  # a larger norm than all other weighted gradients together
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
    | no | any | any | any | any | none: the gradient is unknown |
    | yes | None or 0 | any | any | any | no gradient |
    | yes | not 0 | 0 | any | any | none: a weight of 0 switches the gradient off |
    | yes | not 0 | not 0 | > 0.5 | ≥ -0.3 or None | dominates |
    | yes | not 0 | not 0 | ≤ 0.5 or None | < -0.3 | fights the base loss |
    | yes | not 0 | not 0 | > 0.5 | < -0.3 | dominates, fights the base loss |
    | yes | not 0 | not 0 | ≤ 0.5 or None | ≥ -0.3 or None | none |

    A gradient of 0 at a single step is not an error: the term may be at its optimum. The live
    display then flags that step; the report flags the term only if it was 0 at every step.

    Args:
        tracked: whether gradient norms were tracked where the term ran.
        weight: weight of the term.
        grad_norm: norm of its gradient before the weight; None without a gradient.
        share: norm of its weighted gradient, divided by the sum of all such norms.
        cosine: cosine between its gradient and that of the base loss.

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
    conditions = {
        DOMINATES: share is not None and share > _LARGE_SHARE,
        FIGHTS: cosine is not None and cosine < _OPPOSING_COSINE,
    }
    return tuple(flag for flag, holds in conditions.items() if holds)
