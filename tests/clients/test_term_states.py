from __future__ import annotations

from typing import Any

import pytest

from steelyard.clients.term_states import TermStates
from steelyard.errors import StateError


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def test_a_state_waits_for_its_term() -> None:
    states, counter = TermStates(), Counter()
    states.load({"counter": {"calls": 3}})
    assert states.encoded() == {"counter": {"calls": 3}}
    states.add_all({"counter": counter})
    assert counter.calls == 3
    counter.calls = 4
    states.add_all({"counter": counter})  # again: its state is its own by now
    assert states.encoded() == {"counter": {"calls": 4}}


def test_a_known_term_is_restored_at_once() -> None:
    states, counter = TermStates(), Counter()
    states.add_all({"counter": counter})
    states.load({"counter": {"calls": 5}})
    assert counter.calls == 5


@pytest.mark.parametrize("state", [{}, {"cals": 1}, None])
def test_a_state_that_does_not_load_stays_and_names_its_term(state: Any) -> None:
    states = TermStates()
    states.load({"counter": state})
    with pytest.raises(StateError, match="the state of 'counter' must be what its state_dict"):
        states.add_all({"counter": Counter()})
    assert states.encoded() == {"counter": state}
