"""Flags for conspicuous terms: dominating, opposing the base loss, or without a gradient.

The live display computes the flags from the metrics of a step, the report from those of a run.
"""

from __future__ import annotations

from steelyard.experiment.step_metrics import Gradient

DOMINATES, FIGHTS, NO_GRADIENT = "dominates", "fights the base loss", "no gradient"
FLAGS = (DOMINATES, FIGHTS, NO_GRADIENT)  # the order in which they are shown

_LARGE_SHARE = 0.5  # a larger norm than all other weighted gradients of its space together
_OPPOSING_COSINE = -0.3
_CANCELLED = 0.05  # of the gradient of the base loss: opposition below this hardly matters


def flags_of(*, tracked: bool, weight: float, gradient: Gradient | None) -> tuple[str, ...]:
    """Flags of a term, in the order of `FLAGS`.

    | tracked | gradient | weight | share | cosine, cancelled | flags |
    |---|---|---|---|---|---|
    | no | any | any | any | any | none: the gradient is unknown |
    | yes | None | any | any | any | no gradient |
    | yes | not None | 0 | any | any | none: a weight of 0 switches the gradient off |
    | yes | not None | not 0 | > 0.5 | – | dominates, unless it is alone in its space |
    | yes | not None | not 0 | – | < -0.3 and ≥ 0.05 | fights the base loss |

    A norm of 0 at a step has no flag: the term may be at its optimum, as a divergence from the
    base model is before the first update.

    Args:
        tracked: whether gradient norms were tracked where the term ran.
        weight: weight of the term.
        gradient: its gradient, at a step or over a run; None without one, and in a run if it was
            0 at every step.

    Example:
        >>> flags_of(tracked=True, weight=0.1, gradient=Gradient(8.0, "logprobs", share=0.7))
        ('dominates',)
        >>> small = Gradient(0.1, "logprobs", share=0.01, cosine=-0.9, cancelled=0.009)
        >>> flags_of(tracked=True, weight=0.1, gradient=small)
        ()
    """
    if not tracked:
        return ()
    if gradient is None:
        return (NO_GRADIENT,)
    if not weight:
        return ()
    conditions = {
        DOMINATES: not gradient.alone and (gradient.share or 0.0) > _LARGE_SHARE,
        FIGHTS: (gradient.cosine or 0.0) < _OPPOSING_COSINE
        and (gradient.cancelled or 0.0) >= _CANCELLED,
    }
    return tuple(flag for flag, holds in conditions.items() if holds)
