from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from steelyard.clients.client_pass import MappedFuture, TwoPasses
from steelyard.errors import InputError
from tests.clients.sdk import Answered
from tests.engine.by_hand import datum


class Plain:
    """A future that knows nothing of event loops."""

    def __init__(self) -> None:
        self.asked: list[float | None] = []

    def result(self, timeout: float | None = None) -> int:
        self.asked.append(timeout)
        return 20


def test_a_future_is_mapped_once() -> None:
    made: list[Any] = []

    def then(given: int) -> int:
        made.append(given)
        return len(made)

    future = MappedFuture(Plain(), then)
    assert future.result() == future.result(5.0) == 1
    assert made == [20]


def test_a_plain_future_can_be_awaited_too() -> None:
    plain = Plain()

    async def main() -> tuple[int, int]:
        future = MappedFuture(plain, lambda given: given + 1)
        return await future, await future.result_async(2.0)

    assert asyncio.run(main()) == (21, 21)
    assert plain.asked == [None, 2.0]


def test_two_passes_take_gradients_of_logprobs_alone(remote: Answered) -> None:
    opened = TwoPasses(remote, [datum([1], [2])])
    with pytest.raises(InputError, match=r"log-probs alone, got \['logits'\]"):
        opened.backward([torch.zeros(1)], {"logits": []}, lambda given: given)
