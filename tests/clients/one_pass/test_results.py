"""What becomes of a request; see also `test_one_pass`, over a real connection."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tinker

from steelyard import RegularizerSpec, regularize
from steelyard.clients.one_pass.results import OnePassFuture
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
