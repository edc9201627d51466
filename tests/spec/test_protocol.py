from __future__ import annotations

from typing import Any

import pytest

from steelyard import Regularizer
from steelyard.spec.protocol import Stateful


class Computes:
    def compute(self, data: Any, logprobs: Any, **options: Any) -> float:
        return 0.0


class ComputesLater:
    async def compute(self, data: Any, logprobs: Any) -> float:
        return 0.0


class Saves:
    def state_dict(self) -> dict[str, float]:
        return {}


class SavesAndLoads(Saves):
    def load_state_dict(self, state: dict[str, float]) -> None: ...


def function(data: Any, logprobs: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("thing", "regularizer", "stateful"),
    [
        (Computes(), True, False),
        (ComputesLater(), True, False),
        (SavesAndLoads(), False, True),
        (Saves(), False, False),
        (function, False, False),
        (None, False, False),
    ],
)
def test_the_members_decide(thing: object, regularizer: bool, stateful: bool) -> None:
    assert isinstance(thing, Regularizer) is regularizer
    assert isinstance(thing, Stateful) is stateful


def test_a_class_of_ones_own_satisfies_the_types() -> None:
    # mypy checks these two lines: the protocols must fit classes that do not know them.
    term: Regularizer = Computes()
    memory: Stateful = SavesAndLoads()
    assert term.compute(None, None, alpha=1.0) == 0.0
    assert memory.state_dict() == {}
