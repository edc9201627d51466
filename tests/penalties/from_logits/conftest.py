from __future__ import annotations

import pytest

from steelyard.penalties.from_logits import _projection_inputs as projected
from tests.penalties.from_logits.projection_cases import CLASSES


@pytest.fixture
def chunks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "_ELSEWHERE", 4 * CLASSES)  # 15 rows: 4, 4, 4 and 3
