from __future__ import annotations

import pytest

from steelyard.engine import tiny
from steelyard.penalties.from_logits import projection as projected


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a projection make five rows of logits at a time, fewer than a batch has."""
    monkeypatch.setattr(projected, "_ELSEWHERE", 5 * tiny.VOCABULARY)
    monkeypatch.setattr(projected, "_ON_GPU", 5 * tiny.VOCABULARY)
