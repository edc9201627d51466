"""When a call takes one pass and when two, over the real SDK and a real server."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from tinker import types

from steelyard import RegularizerSpec, regularize, telemetry
from steelyard.clients import Explanation, UploadRefusedWarning
from steelyard.clients.one_pass.one_pass import is_split
from steelyard.composition.aggregate import Aggregator
from steelyard.doctor import FindingWarning
from steelyard.engine import LocalServiceClient
from steelyard.engine.server import session_routes
from steelyard.engine.server.app import RunningServer
from steelyard.errors import ClosedError, InputError, NonFiniteError, SpecError, TermError
from steelyard.regularizers import L1, L2, DemographicParity, Entropy, KLToReference
from steelyard.spec.schedules import linear
from tests.engine.server.wire_client import start

from .batches import STEP, assert_same, batch

KL = RegularizerSpec(KLToReference(), weight=linear(0.1, 0.5, 5), name="kl")
TERMS = [KL, RegularizerSpec(L2(), weight=0.02, name="l2")]


def losses(running: RunningServer, training: tinker.TrainingClient) -> int:
    """Number of losses that were uploaded in the session of a client."""
    return len(running._state.sessions.get(training.holder.get_session_id()).losses)


@pytest.fixture
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Training client of a server with settings of its own, and its service client."""
    with start(tmp_path, **getattr(request, "param", {})) as running:
        service = tinker.ServiceClient(base_url=running.base_url, api_key="tml-local")
        with service:
            yield service, service.create_lora_training_client("tiny-random", rank=4, seed=0)


def test_weights_and_batches_upload_nothing_again(
    running: RunningServer, training: tinker.TrainingClient, other: tinker.TrainingClient
) -> None:
    first, second = (regularize(each, TERMS, track_grad_norms=True) for each in (training, other))
    for step in range(4):
        lengths = [3 + step, 5] if step % 2 else [4, 4, 7]
        assert first.forward_backward(batch(step, lengths=lengths), "cross_entropy").result()
        first.optim_step(STEP).result()
    first.pipeline.set_weight("l2", 0.5)
    output = first.forward_backward(batch(), "cross_entropy").result()
    assert output.regularizers["l2"].weight == 0.5
    assert losses(running, training) == 1
    # Another client of the session shares the handle: the SDK takes a graph only once.
    assert second.forward_backward(batch(), "cross_entropy").result().passes == 1
    assert losses(running, other) == 1
    first.pipeline.set_enabled("l2", False)
    output = first.forward_backward(batch(), "cross_entropy").result()
    assert (output.passes, output.not_run) == (1, ("l2",))
    assert losses(running, training) == 2


def test_the_service_client_can_upload(
    service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    client = regularize(training, TERMS, service=service, server_side=True)
    assert str(client.explain()) == "no call yet."
    assert client.forward_backward(batch(), "cross_entropy").result().passes == 1
    assert client.explain() == Explanation(1)
    assert str(client.explain()) == "one pass."


def test_a_service_of_another_session_cannot(
    running: RunningServer, training: tinker.TrainingClient
) -> None:
    with tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as stranger:
        client = regularize(training, TERMS, service=stranger)
        assert client.forward_backward(batch(), "cross_entropy").result().passes == 2
    assert "another session" in client.explain().reasons[""]


def test_the_call_returns_before_the_result(training: tinker.TrainingClient) -> None:
    """The pipelining of the SDK: a step is queued behind a call that is not done."""
    client = regularize(training, TERMS, server_side=True)
    client.forward_backward(batch(), "cross_entropy").result()
    gate = threading.Event()
    held = client.holder.run_coroutine_threadsafe(asyncio.to_thread(gate.wait, 600))
    future = client.forward_backward(batch(), "cross_entropy")
    update = client.optim_step(STEP)
    gate.set()
    held.result()
    assert future.result().passes == 1
    assert update.result().metrics["unclipped_grad_l2:mean"] > 0
    assert future.result() is future.result(600)


def test_async_calls(training: tinker.TrainingClient, other: tinker.TrainingClient) -> None:
    async def main() -> list[Any]:
        outputs = []
        for client, side in ((training, True), (other, False)):
            wrapped = regularize(client, TERMS, track_grad_norms=True, server_side=side)
            future = await wrapped.forward_backward_async(batch(), "importance_sampling")
            await wrapped.optim_step_async(STEP)
            outputs.append(await future)
        return outputs

    found, expected = asyncio.run(main())
    assert (found.passes, expected.passes) == (1, 2)
    assert_same(found, expected)


def test_drivers_are_computed_here(
    training: tinker.TrainingClient, other: tinker.TrainingClient
) -> None:
    found, expected = (
        regularize(client, TERMS, track_grad_norms=True, server_side=side)
        .forward_backward(batch(), "cross_entropy")
        .result()
        for client, side in ((training, True), (other, False))
    )
    assert list(found.term_gradients) == list(expected.term_gradients)
    for name in ("base", "kl", "l2"):
        ours, theirs = (each.drivers(name, 4) for each in (found, expected))
        assert [each.datum for each in ours] == [each.datum for each in theirs]
        shares = [each.share for each in ours]
        assert shares == pytest.approx([each.share for each in theirs], rel=1e-4)


def test_a_mixture_takes_two_passes_and_says_why(training: tinker.TrainingClient) -> None:
    parity = RegularizerSpec(DemographicParity(test="none"), weight=0.1, name="parity")
    held = RegularizerSpec(L1(), at_most=9.0, name="held")
    client = regularize(training, [*TERMS, parity, held])
    output = client.forward_backward(batch(), "cross_entropy").result()
    assert output.passes == 2
    reasons = client.explain().reasons
    assert list(reasons) == ["parity", "held"]
    assert str(client.explain()).splitlines()[1].startswith("  parity: it is no sum over data")
    strict = regularize(client.client, [*TERMS, parity], server_side=True)
    with pytest.raises(SpecError, match=r"server_side=True needs .* and parity: it is no sum"):
        strict.forward_backward(batch(), "cross_entropy")


def test_an_entropy_of_fixed_data_is_not_uploaded(training: tinker.TrainingClient) -> None:
    data = batch(logprobs=False)
    bonus = RegularizerSpec(Entropy(mode="bonus"), weight=0.1, name="entropy")
    client = regularize(training, [bonus], server_side=True)
    with pytest.raises(
        SpecError, match=r"entropy: an entropy from log-probs .T. takes tokens that"
    ):
        client.forward_backward(data, "cross_entropy")
    assert client.forward_backward(batch(), "cross_entropy").result().passes == 1
    client = regularize(training, [bonus])
    with pytest.raises(TermError, match=r"Train on steelyard\.engine"):
        client.forward_backward(data, "cross_entropy")


def test_an_aggregator_takes_two_passes(training: tinker.TrainingClient) -> None:
    class Half(Aggregator):
        reads_gram = False

        def factors(self, values: Any, weights: Any, products: Any) -> list[float]:
            return [1.0] * len(values)

    client = regularize(training, TERMS, aggregate=Half())
    assert client.forward_backward(batch(), "cross_entropy").result().passes == 2
    assert "the aggregator needs" in str(client.explain())


def test_server_side_has_three_values(training: tinker.TrainingClient) -> None:
    for wrong in ("yes", 1, None):
        with pytest.raises(SpecError, match="server_side must be 'auto', True or False, got"):
            regularize(training, TERMS, server_side=wrong)  # type: ignore[arg-type]
    client = regularize(training, TERMS, server_side=False)
    assert client.forward_backward(batch(), "cross_entropy").result().passes == 2
    assert client.explain().reasons == {"": "server_side is False"}


def test_a_wrong_step_and_a_closed_pipeline_are_errors(training: tinker.TrainingClient) -> None:
    client = regularize(training, TERMS)
    with pytest.raises(InputError, match="step must be a whole number >= 0, got -1"):
        client.forward_backward_custom(batch(), lambda _, rows: rows[0].sum(), step=-1)
    with pytest.raises(InputError, match="step must be a whole number >= 0, got '3'"):
        client.forward_backward_custom(batch(), lambda _, rows: rows[0].sum(), step="3")  # type: ignore[arg-type]
    client.pipeline.close()
    with pytest.raises(ClosedError, match="a pipeline must be open to compute"):
        client.forward_backward_custom(batch(), client.pipeline.loss_fn)


def test_the_engine_takes_one_pass_anyway(tmp_path: Path) -> None:
    with LocalServiceClient(checkpoint_dir=tmp_path) as service:
        training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        client = regularize(training, TERMS, server_side=True)
        assert client.forward_backward(batch(), "cross_entropy").result().passes == 1
        assert client.explain().passes == 1


def not_finite() -> list[types.Datum]:
    data = batch()
    reference = data[1].loss_fn_inputs["reference_logprobs"].to_torch().clone()
    counts = data[1].loss_fn_inputs["weights"].to_torch() != 0
    reference[counts.nonzero()[0]] = torch.nan
    data[1].loss_fn_inputs["reference_logprobs"] = types.TensorData.from_torch(reference)
    return data


@pytest.mark.parametrize("queued", [False, True])
def test_a_term_that_is_not_finite_is_named(training: tinker.TrainingClient, queued: bool) -> None:
    client = regularize(training, TERMS, server_side=True)
    future = client.forward_backward(not_finite(), "cross_entropy")
    updates = [client.optim_step(STEP)] if queued else []
    with pytest.raises(NonFiniteError, match="the value of regularizer 'kl' must be finite"):
        future.result()
    updates = updates or [client.optim_step(STEP)]
    assert updates[0].result().metrics == {"unclipped_grad_l2:mean": 0.0}
    # The terms are all right: the next batch runs in one pass.
    assert client.forward_backward(batch(), "cross_entropy").result().passes == 1


@pytest.mark.parametrize("own", [{"max_nodes": 6}], indirect=True)
def test_a_graph_that_the_server_refuses_costs_one_warning(own: Any) -> None:
    service, training = own
    client = regularize(training, TERMS, service=service)
    with pytest.warns(UploadRefusedWarning, match=r"graph\.nodes must hold 1 to 6 nodes"):
        output = client.forward_backward(batch(), "cross_entropy").result()
    assert output.passes == 2
    assert "the server refuses the loss" in client.explain().reasons[""]
    # It is known in the session, and neither uploaded nor reported again.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert client.forward_backward(batch(1), "cross_entropy").result().passes == 2
    strict = regularize(training, TERMS, service=service, server_side=True)
    with (
        pytest.warns(UploadRefusedWarning),
        pytest.raises(SpecError, match="the server refuses the loss"),
    ):
        strict.forward_backward(batch(), "cross_entropy")


@pytest.mark.parametrize("own", [{"max_loss_bytes": 64}], indirect=True)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_fails_is_repeated_in_two_passes(own: Any, asynchronous: bool) -> None:
    service, training = own
    client = regularize(training, TERMS, service=service)
    future = client.forward_backward(batch(), "cross_entropy")
    with pytest.warns(UploadRefusedWarning, match="at most 64 bytes"):
        output = asyncio.run(future.result_async()) if asynchronous else future.result()
    assert output.passes == 2
    assert future.result() is output
    assert client.optim_step(STEP).result().metrics["unclipped_grad_l2:mean"] > 0
    assert client.forward_backward(batch(), "cross_entropy").result().passes == 2


@pytest.mark.parametrize("own", [{"max_loss_bytes": 64}], indirect=True)
def test_a_request_that_fails_before_a_queued_step_is_not_repeated(own: Any) -> None:
    service, training = own
    client = regularize(training, TERMS, service=service)
    future = client.forward_backward(batch(), "cross_entropy")
    client.optim_step(STEP).result()
    with (
        pytest.warns(UploadRefusedWarning),
        pytest.raises(tinker.RequestFailedError, match="at most 64 bytes") as caught,
    ):
        future.result()
    assert "This call was not repeated" in caught.value.__notes__[0]
    assert client.forward_backward(batch(), "cross_entropy").result().passes == 2


@pytest.mark.parametrize("own", [{"max_loss_bytes": 64}], indirect=True)
def test_a_batch_of_several_requests_is_not_repeated(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of its requests may have succeeded, and their gradients would count twice."""
    service, training = own
    config = training.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 3})
    monkeypatch.setattr(training.holder, "_client_config", config)
    client = regularize(training, TERMS, service=service)
    with (
        pytest.warns(UploadRefusedWarning),
        pytest.raises(tinker.RequestFailedError, match="at most 64 bytes") as caught,
    ):
        client.forward_backward(batch(), "cross_entropy").result()
    assert "a part of its batch may have been accumulated" in caught.value.__notes__[0]


IMAGE = types.ImageChunk(data=bytes(40), format="png", expected_tokens=2)
STORED = types.ImageAssetPointerChunk(location="x" * 20, format="png", expected_tokens=2)


@pytest.mark.parametrize("chunk", [types.EncodedTextChunk(tokens=[1, 2, 3]), IMAGE, STORED])
@pytest.mark.parametrize("longest", [2, 3])
def test_a_batch_is_split_where_the_sdk_splits_it(
    own: Any, monkeypatch: pytest.MonkeyPatch, chunk: Any, longest: int
) -> None:
    """Against the SDK's own function: on both sides of its limit in bytes, and by the number."""
    _, training = own
    inputs = {"target_tokens": torch.arange(5), "weights": torch.ones(5)}
    datum = types.Datum(
        model_input=types.ModelInput(chunks=[chunk]),
        loss_fn_inputs={k: types.TensorData.from_torch(v) for k, v in inputs.items()},
    )
    split = []
    for most in range(180, 360):
        limits = {"fwdbwd_max_chunk_len": longest, "fwdbwd_max_chunk_bytes_count": most}
        config = training.holder._client_config.model_copy(update=limits)
        monkeypatch.setattr(training.holder, "_client_config", config)
        for data in ([datum], [datum] * 3):
            split.append(len(list(training._chunked_requests_generator(data))) > 1)
            assert is_split(training, data) == split[-1]
    assert set(split[1::2]) == ({True, False} if longest == 3 else {True})
    assert not any(split[::2])
    assert not is_split(object(), [datum] * 3)


def test_a_sparse_tensor_counts_as_much_as_the_sdk_counts_at_least(own: Any) -> None:
    _, training = own
    sparse = types.TensorData.from_torch_sparse(torch.eye(2, 40))
    assert sparse.sparse_col_indices is not None
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"weights": sparse}
    )
    limits = {"fwdbwd_max_chunk_bytes_count": 2 * (2 * 4 + 2 * 4 + 3 * 8 + 2 * 8) - 1}
    training.holder._client_config = training.holder._client_config.model_copy(update=limits)
    assert len(list(training._chunked_requests_generator([datum, datum]))) == 2
    assert is_split(training, [datum, datum])


def test_a_server_that_does_not_run_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = session_routes.CONFIG.model_copy(update={"custom_loss_server_side": False})
    monkeypatch.setattr(session_routes, "CONFIG", config)
    with (
        start(tmp_path) as running,
        tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service,
    ):
        training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        client = regularize(training, TERMS, service=service)
        assert client.forward_backward(batch(), "cross_entropy").result().passes == 2
        strict = regularize(training, TERMS, service=service, server_side=True)
        with pytest.raises(SpecError, match="in one pass, and the server does not run uploaded"):
            strict.forward_backward(batch(), "cross_entropy")


class Edited:
    """The SDK's client; the results of uploaded losses are changed on their way."""

    def __init__(self, client: tinker.TrainingClient, drop: str) -> None:
        self._client, self._drop = client, drop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def forward_backward_custom(self, data: Any, handle: Any) -> Any:
        result = self._client.forward_backward_custom(data, handle).result()
        outputs = result.loss_fn_outputs
        if "logprobs" in self._drop:
            outputs = [{k: v for k, v in each.items() if k != "logprobs"} for each in outputs]
        metrics = result.metrics
        if "metrics" in self._drop:
            metrics = {k: v for k, v in metrics.items() if not k.startswith("custom/v")}
        edited = replace(result, loss_fn_outputs=outputs, metrics=metrics)

        class Done:
            def result(self, _: float | None = None) -> Any:
                return edited

        return Done()


@pytest.mark.parametrize("drop", ["logprobs", "metrics", "logprobs and metrics"])
def test_an_answer_that_lacks_something_costs_one_warning(
    service: tinker.ServiceClient,
    training: tinker.TrainingClient,
    other: tinker.TrainingClient,
    drop: str,
) -> None:
    # Terms of their own: the session's other tests must not find them refused.
    terms = [replace(TERMS[0], name=drop), RegularizerSpec(L1(), weight=0.3, name=f"l1 {drop}")]
    client = regularize(Edited(training, drop), terms, service=service)
    with pytest.warns(UploadRefusedWarning, match="did not send"):
        found = client.forward_backward(batch(), "cross_entropy").result()
    expected = regularize(other, terms, server_side=False)
    value = expected.forward_backward(batch(), "cross_entropy").result()
    assert found.loss_total == pytest.approx(value.loss_total, rel=1e-5)
    # The gradient was accumulated, once.
    updates = [each.optim_step(STEP).result().metrics for each in (client, expected)]
    assert updates[0] == pytest.approx(updates[1], rel=1e-4)
    assert client.forward_backward(batch(), "cross_entropy").result().passes == 2


def test_events_are_those_of_a_call(training: tinker.TrainingClient) -> None:
    events: list[tuple[str, Any]] = []
    client = regularize(training, TERMS, track_grad_norms=True, server_side=True)
    telemetry.attach(
        "one pass", "steelyard.custom_loss.stop", lambda e, m, *_: events.append((e, m))
    )
    try:
        output = client.forward_backward(batch(), "cross_entropy").result()
    finally:
        telemetry.detach("one pass")
    [(_, measured)] = events
    assert measured["loss_total"] == output.loss_total
    assert measured["total_grad_norm"] == output.total_grad_norm


def test_a_kl_to_the_policy_itself_warns(training: tinker.TrainingClient) -> None:
    client = regularize(training, [KL], server_side=True)

    def step() -> None:
        data = batch(weights=False)
        own = training.forward(data, "cross_entropy").result().loss_fn_outputs
        for datum, outputs in zip(data, own, strict=True):
            datum.loss_fn_inputs["reference_logprobs"] = outputs["logprobs"]
        output = client.forward_backward(data, "cross_entropy").result()
        assert (output.passes, output.regularizers["kl"].custom["k2"]) == (1, 0.0)
        client.optim_step(STEP).result()

    for _ in range(5):
        step()
    with pytest.warns(FindingWarning, match="'kl' has no gradient"):
        step()
    step()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_that_cannot_be_sent_ends_with_an_event(
    training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    def broken(*_: Any) -> Any:
        raise ConnectionError("no route")

    for name in ("forward_backward_custom", "forward_backward_custom_async"):
        monkeypatch.setattr(training, name, broken)
    client, events = regularize(training, TERMS, server_side=True), list[str]()
    names = [f"steelyard.custom_loss.{name}" for name in ("start", "stop", "exception")]
    for name in names:
        telemetry.attach(name, name, lambda event, *_: events.append(event))

    def call() -> None:
        if asynchronous:
            asyncio.run(client.forward_backward_async(batch(), "cross_entropy"))
        else:
            client.forward_backward(batch(), "cross_entropy")

    try:
        with pytest.raises(ConnectionError, match="no route"):
            call()
    finally:
        for name in names:
            telemetry.detach(name)
    assert events == [names[0], names[2]]


def test_progress_is_measured_in_two_passes(training: tinker.TrainingClient) -> None:
    client = regularize(training, TERMS, measure_progress=2, track_grad_norms=True, track_every=3)
    passes, norms = [], []
    for step in range(4):
        output = client.forward_backward(batch(step), "cross_entropy").result()
        client.optim_step(STEP).result()
        passes.append(output.passes)
        norms.append(output.total_grad_norm is not None)
    assert passes == [2, 1, 2, 1]
    assert norms == [True, False, False, True]
    assert client.explain() == Explanation(1)


def test_shares_of_a_mean_take_two_passes(
    training: tinker.TrainingClient, other: tinker.TrainingClient
) -> None:
    """Two calls of half the data, with half the weight, are one call with all of them."""
    data = batch(lengths=[4, 4])
    whole = regularize(other, TERMS, server_side=False)
    expected = whole.forward_backward_custom(data, mean_nll).result()
    client = regularize(training, TERMS)
    half = {"base": 0.5, "kl": 0.5, "l2": 0.5}
    calls = [
        client.forward_backward_custom([datum], mean_nll, share=half).result() for datum in data
    ]
    assert [call.passes for call in calls] == [2, 2]
    assert client.explain().reasons[""].startswith("the share of an accumulated mean")
    assert sum(call.loss_total for call in calls) == pytest.approx(expected.loss_total, rel=1e-5)
    norms = [each.optim_step(STEP).result().metrics for each in (client, whole)]
    key = "unclipped_grad_l2:mean"
    assert norms[0][key] == pytest.approx(norms[1][key], rel=1e-4)


def mean_nll(data: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
    return -torch.cat(logprobs).mean()
