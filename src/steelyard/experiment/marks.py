"""When a term is worth a second look; the live display and the report agree on it."""

from __future__ import annotations

_DOMINATES = 0.5  # of the norms of all terms' gradients
_FIGHTS = -0.3  # cosine to the base loss


def dominates(share: float | None) -> bool:
    """Whether a term pulls more than all others together."""
    return share is not None and share > _DOMINATES


def fights(cosine: float | None) -> bool:
    """Whether a term pulls clearly against the base loss."""
    return cosine is not None and cosine < _FIGHTS
