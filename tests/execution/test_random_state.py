"""States of the global random generators, and generators of a call's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.execution.random_state import GlobalStates, Randomness, Turn

DRAWS: list[Callable[[], Any]] = [
    random.random,
    lambda: random.gauss(0, 1),
    np.random.rand,
    np.random.randn,
    lambda: torch.rand(()).item(),
]


def numpy_state() -> tuple[Any, ...]:
    _, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - users' own
    return (np.asarray(keys).tolist(), *rest)


@pytest.mark.parametrize("draw", DRAWS)
def test_each_draw_is_seen_seeded_and_taken_back(draw: Callable[[], Any]) -> None:
    drawn = []
    for _ in range(2):
        draw()  # from wherever the generator is
        before = random.getstate(), *numpy_state(), torch.get_rng_state()
        with GlobalStates((1, 2, 3), watched=True) as states:
            drawn.append(draw())
        after = random.getstate(), *numpy_state(), torch.get_rng_state()
        assert states.drew
        assert before[:-1] == after[:-1]
        assert torch.equal(before[-1], after[-1])
    assert drawn[0] == drawn[1]
    with GlobalStates((1, 2, 4), watched=False):
        assert draw() != drawn[0]


def test_work_that_draws_nothing_is_not_seen_to() -> None:
    with GlobalStates((1,), watched=True) as states:
        torch.rand((), generator=torch.Generator())
        np.random.default_rng().random()
        random.Random().random()
    assert not states.drew


def test_a_coroutine_keeps_its_states_while_it_waits() -> None:
    async def draws() -> list[float]:
        numbers = []
        for _ in range(3):
            numbers.append(random.random())
            await asyncio.sleep(0)
        return numbers

    async def main() -> list[list[float]]:
        states = [GlobalStates((n,), watched=True) for n in range(3)]
        found = await asyncio.gather(*(each.run(draws()) for each in states))
        assert all(each.drew for each in states)
        return found

    together = asyncio.run(main())
    alone = [asyncio.run(GlobalStates((n,), watched=False).run(draws())) for n in range(3)]
    assert together == alone


def test_an_error_passes_through_and_the_states_are_restored() -> None:
    async def fails() -> None:
        random.random()
        raise ValueError("drawn")

    before = random.getstate()
    with pytest.raises(ValueError, match="drawn"):
        asyncio.run(GlobalStates((1,), watched=False).run(fails()))
    assert random.getstate() == before


def test_work_that_has_overrun_its_turn_changes_nothing_any_more() -> None:
    before = random.getstate()
    turn = Turn()
    turn.take()
    with turn.inside():
        with GlobalStates((1,), watched=True) as states:
            random.random()
            turn.end()
            assert random.getstate() == before
        assert not states.drew
        with GlobalStates((1,), watched=True) as states:
            assert random.getstate() == before
        assert not states.drew
    assert random.getstate() == before


def test_a_generator_is_seeded_by_the_key() -> None:
    def number(*key: int) -> float:
        randomness = Randomness(key, generator=True, seeds_global=False, watched=False)
        (generator,) = randomness.arguments(torch.device("cpu")).values()
        return torch.rand((), generator=generator).item()

    assert number(1, 2) == number(1, 2) != number(2, 1)
    plain = Randomness((1,), generator=False, seeds_global=True, watched=False)
    assert plain.arguments(torch.device("cpu")) == {}
