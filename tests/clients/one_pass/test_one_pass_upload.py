from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import tinker

from steelyard.clients.one_pass.loss_graph import GraphTerm, LossGraph, build_graph
from steelyard.clients.one_pass.one_pass import NOT_RUN, RefusedError, Uploader
from steelyard.composition.per_datum import PerDatum


def graph_of(scale: float) -> LossGraph:
    term = GraphTerm("base", PerDatum(lambda logprobs: scale * logprobs), {})
    return build_graph([term], {"logprobs": 1, "mask": 1}, tracked=False)


def test_clients_of_a_session_share_handles(
    training: tinker.TrainingClient, other: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    first, second, third = Uploader(training), Uploader(other), Uploader(other, service)
    assert first.why_not() is second.why_not() is third.why_not() is None
    handle = first.upload(graph_of(2.0))
    assert handle.loss_id is not None
    assert first.upload(graph_of(2.0)) is second.upload(graph_of(2.0)) is handle
    assert third.upload(graph_of(2.0)) is handle
    assert second.upload(graph_of(3.0)).loss_id != handle.loss_id


def test_a_refusal_is_known_in_the_session(
    training: tinker.TrainingClient, other: tinker.TrainingClient
) -> None:
    first, second = Uploader(training), Uploader(other)
    first.upload(graph_of(4.0))
    first.refuse(graph_of(4.0), "it answered with other metrics")
    with pytest.raises(RefusedError, match="it answered with other metrics"):
        second.upload(graph_of(4.0))


def test_a_client_that_cannot_upload_says_so() -> None:
    assert "pass service=" in str(Uploader(object()).why_not())


@dataclass
class Service:
    """A service of somebody else, whose uploads go wrong."""

    handle: Any
    uploads: list[Any] = field(default_factory=list)

    @property
    def holder(self) -> Any:
        return None

    def create_custom_loss(self, fn: Any, ranks: Any) -> Any:
        self.uploads.append(ranks)
        return self

    def result(self) -> Any:
        return self.handle


class Handle:
    loss_id = None


def test_a_service_that_does_not_say_that_it_runs_losses_is_not_asked() -> None:
    assert Uploader(object(), Service(Handle())).why_not() == NOT_RUN


def test_a_handle_without_an_id_and_an_error_are_refusals() -> None:
    for handle, reason in ((Handle(), NOT_RUN), (None, "has no attribute 'loss_id'")):
        service = Service(handle)
        uploader = Uploader(object(), service)
        for _ in range(2):
            with pytest.raises(
                RefusedError if handle else (RefusedError, AttributeError), match=reason
            ):
                uploader.upload(graph_of(1.0))
