"""What regularizers are computed together."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.composition.terms import Joint
from steelyard.regularizers import WholeVocabulary


def count_together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many terms were computed together, a group at a time."""
    counts: list[int] = []
    own = WholeVocabulary.compute_together

    def compute(self: WholeVocabulary, others: Any, *args: Any, **kwargs: Any) -> Joint | None:
        counts.append(1 + len(others))
        return own(self, others, *args, **kwargs)

    monkeypatch.setattr(WholeVocabulary, "compute_together", compute)
    return counts
