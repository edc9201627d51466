"""The two requests of a custom loss, and their future."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tinker import types

from steelyard.clients.client_pass import MappedFuture, TwoPasses
from steelyard.errors import InputError
from tests.clients.sdk import Answered
from tests.engine.by_hand import datum


class Plain:
    """A future without `result_async`."""

    def __init__(self) -> None:
        self.timeouts: list[float | None] = []

    def result(self, timeout: float | None = None) -> int:
        self.timeouts.append(timeout)
        return 20


def test_the_result_is_transformed_once() -> None:
    results: list[Any] = []

    def transform(result: int) -> int:
        results.append(result)
        return len(results)

    future = MappedFuture(Plain(), transform)
    assert future.result() == future.result(5.0) == 1
    assert results == [20]


def test_the_result_is_transformed_once_for_all_threads() -> None:
    """Each result would be another object, and what the transform does would be done again."""
    begun, results = threading.Barrier(2, timeout=600), []

    class Together:
        def result(self) -> int:
            begun.wait()  # both threads have the result before one of them transforms it
            return 20

    def transform(result: int) -> object:
        results.append(result)
        time.sleep(0)  # lets the other thread run
        return object()

    future = MappedFuture(Together(), transform)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda _: future.result(), range(2)))
    assert found[0] is found[1]
    assert results == [20]


def test_a_future_without_result_async_can_be_awaited() -> None:
    plain = Plain()

    async def main() -> tuple[int, int]:
        future = MappedFuture(plain, lambda result: result + 1)
        return await future, await future.result_async(2.0)

    assert asyncio.run(main()) == (21, 21)
    assert plain.timeouts == [None, 2.0]


def test_two_passes_take_gradients_of_logprobs_alone(remote: Answered) -> None:
    forward = TwoPasses(remote, [datum([1], [2])])
    with pytest.raises(InputError, match=r"log-probs alone, got \['logits'\]"):
        forward.backward([torch.zeros(1)], {"logits": []}, lambda result: result)


def test_a_datum_without_weights_is_sent_with_zeros(remote: Answered) -> None:
    TwoPasses(remote, [datum([1, 2], [[3, 4], [5, 6]]), datum([1], [2], weights=[0.5])])
    [(verb, sent)] = remote.sent
    assert verb == "forward"
    assert [each.loss_fn_inputs["weights"].tolist() for each in sent] == [
        [[0.0, 0.0], [0.0, 0.0]],
        [0.5],
    ]


def test_the_backward_pass_sends_the_negative_gradient_as_weights(remote: Answered) -> None:
    forward = TwoPasses(remote, [datum([1, 2], [2, 3]), datum([4], [5])])
    assert [row.shape for row in forward.logprobs] == [(2,), (1,)]
    gradients = [torch.tensor([0.5, -1.0]), torch.tensor([2.0])]
    future = forward.backward(gradients, {}, lambda result: result.metrics["loss:sum"])
    verb, sent = remote.sent[-1]
    assert verb == "forward_backward"
    assert [each.loss_fn_inputs["weights"].tolist() for each in sent] == [[-0.5, 1.0], [-2.0]]
    # cross_entropy = -Σ logprobs · weights = Σ logprobs · gradient
    linear = sum((a * b).sum().item() for a, b in zip(forward.logprobs, gradients, strict=True))
    assert future.result() == pytest.approx(linear, rel=1e-5)


def test_data_without_targets_are_refused(remote: Answered) -> None:
    with pytest.raises(InputError, match="at least one Datum, got none"):
        TwoPasses(remote, [])
    with pytest.raises(InputError, match=r"data\[0\].* must hold 'target_tokens', got \[\]"):
        TwoPasses(remote, [types.Datum(types.ModelInput.from_ints([1]))])
    assert remote.sent == []
