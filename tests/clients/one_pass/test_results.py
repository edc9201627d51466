"""What becomes of a request; see also `test_one_pass`, over a real connection."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import tinker
from tinker import types

from steelyard import BaseLossOutput, CustomLossOutput, RegularizerSpec, regularize
from steelyard.clients.one_pass.results import OnePassFuture, SentCall, TwoPassCall
from steelyard.errors import NonFiniteError
from steelyard.regularizers import L1

from .batches import batch


class Broken:
    """A request whose server cannot be reached."""

    def result(self, _: float | None = None) -> Any:
        raise ConnectionError("no route")

    async def result_async(self, _: float | None = None) -> Any:
        raise ConnectionError("no route")


def test_a_connection_that_breaks_is_no_refusal(training: tinker.TrainingClient) -> None:
    """The request may have been run: it is not made again in another way."""
    client = regularize(training, [RegularizerSpec(L1(), weight=0.1)], server_side=True)
    future = client.forward_backward(batch(), "cross_entropy")
    broken = OnePassFuture(Broken(), future._sent)
    with pytest.raises(ConnectionError, match="no route"):
        broken.result()
    with pytest.raises(ConnectionError, match="no route"):
        asyncio.run(broken.result_async())
    assert future.result().passes == 1


def test_metrics_of_the_graph_do_not_reach_the_user(training: tinker.TrainingClient) -> None:
    client = regularize(training, [RegularizerSpec(L1(), weight=0.1)], server_side=True)
    output = client.forward_backward(batch(), "cross_entropy").result()
    assert sorted(output.server_metrics) == ["loss:sum", "surrogate_loss:sum"]
    assert output.gradients is None
    assert output.to_dict().keys().isdisjoint({"passes", "term_gradients"})


class Rejected:
    """A request that the server has rejected."""

    def result(self, _: float | None = None) -> Any:
        raise tinker.RequestFailedError("too large", "request", types.RequestErrorCategory.User)


class Slow:
    """The call in two passes: its answer arrives at the second question."""

    def __init__(self) -> None:
        self.asked = 0

    def result(self) -> Any:
        self.asked += 1
        if self.asked == 1:
            raise ConnectionError("lost the answer")
        return OUTPUT


OUTPUT = CustomLossOutput(1.0, BaseLossOutput(1.0))


def rejected(submit: Any, evaluate: Any = lambda: None) -> OnePassFuture:
    again = TwoPassCall(evaluate, submit, lambda: 0, lambda *_: pytest.fail("not described"))
    nothing: Any = SimpleNamespace(fail=lambda _: None)
    sent = SentCall(
        nothing, nothing, lambda: False, again, lambda _: None, lambda _: pytest.fail("here"), 0
    )
    return OnePassFuture(Rejected(), sent)


def test_a_repeated_call_is_submitted_once_however_often_it_is_asked_for() -> None:
    """Submitted twice, its gradient would count twice."""
    submitted: list[Slow] = []

    def submit(_: Any) -> Slow:
        submitted.append(Slow())
        return submitted[-1]

    future = rejected(submit)
    with pytest.raises(ConnectionError, match="lost the answer"):
        future.result()
    assert future.result() is OUTPUT
    assert len(submitted) == 1


def test_a_call_that_cannot_be_repeated_is_tried_once() -> None:
    """Later, the model would be another."""
    tried = []

    def evaluate() -> None:
        tried.append(1)
        raise NonFiniteError("a term is NaN", term="kl")

    future = rejected(pytest.fail, evaluate)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match="a term is NaN"):
            future.result()
    assert tried == [1]


def test_an_answer_that_cannot_be_read_is_not_repeated() -> None:
    """The request was accepted: its gradient is accumulated."""

    class Accepted:
        def result(self) -> Any:
            return "accepted"

    def refused(_: Any) -> Any:
        Rejected().result()

    future = rejected(pytest.fail, pytest.fail)
    future._future, future._transform = Accepted(), refused
    with pytest.raises(tinker.RequestFailedError, match="too large"):
        future.result()
