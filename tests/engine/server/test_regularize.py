"""`regularize` around the real SDK, over a real connection."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import tinker
import torch
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient
from steelyard.engine.server.app import RunningServer
from tests.engine.data import SMALL, datum, ragged

DATA = ragged(0, [9, 4, 6])


def nll(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    rows = zip(data, logprobs, strict=True)
    loss = -sum((row * d.loss_fn_inputs["weights"].to_torch()).sum() for d, row in rows)
    return torch.as_tensor(loss), {"data": float(len(data))}


def confidence(_: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(logprobs).exp().mean()


async def drift(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    flat = torch.cat(logprobs)
    return (flat + 6).square().mean(), {"largest": flat.max().item()}


SPECS = [
    RegularizerSpec(confidence, weight=10.0, name="confidence", run_in="thread"),
    RegularizerSpec(drift, weight=0.3, name="drift"),
]


def steps(training: Any) -> list[Any]:
    client = regularize(training)
    outputs = []
    for _ in range(3):
        future = client.forward_backward_custom(
            DATA, nll, regularizers=SPECS, track_grad_norms=True
        )
        step = client.optim_step(SMALL)
        outputs.append((future.result(), step.result().metrics))
    return outputs


def test_the_terms_equal_those_of_the_local_client(
    training: tinker.TrainingClient, local: LocalServiceClient
) -> None:
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    near: Any = {"rel": 1e-5, "abs": 1e-5}
    for (served, step), (expected, local_step) in zip(steps(training), steps(mine), strict=True):
        assert served.loss_total == pytest.approx(expected.loss_total, **near)
        assert served.base_loss.grad_norm == pytest.approx(expected.base_loss.grad_norm, **near)
        assert served.regularizers.keys() == expected.regularizers.keys()
        for name, term in served.regularizers.items():
            other = expected.regularizers[name]
            for field in ("value", "weight", "contribution", "grad_norm", "grad_norm_weighted"):
                assert getattr(term, field) == pytest.approx(getattr(other, field), **near), field
            assert term.custom == pytest.approx(other.custom, **near)
        assert served.cosines == pytest.approx(expected.cosines, **near)
        assert served.server_metrics == pytest.approx(expected.server_metrics, **near)
        assert step == pytest.approx(local_step, **near)
        for ours, theirs in zip(served.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            torch.testing.assert_close(
                ours["logprobs"].to_torch(), theirs["logprobs"].to_torch(), atol=1e-5, rtol=1e-5
            )


POLICY = [
    datum([1, 2, 3], logprobs=[0.0, -6.5, -6.2], advantages=[0.0, -1.0, 0.5]),
    datum([4, 5], logprobs=[0.0, -6.1], advantages=[0.0, 0.3]),
]


def named_steps(training: Any) -> list[Any]:
    """Steps in the order of tinker-cookbook: a step is enqueued before a result is awaited."""
    client = regularize(training, SPECS, track_grad_norms=True)

    async def main() -> list[Any]:
        pending = []
        for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo", "cross_entropy"):
            future = await client.forward_backward_async(POLICY, loss_fn=name)
            pending.append((future, await client.optim_step_async(SMALL)))
        return [(await a.result_async(), (await b.result_async()).metrics) for a, b in pending]

    return asyncio.run(main())


def test_named_losses_with_terms_equal_those_of_the_local_client(
    training: tinker.TrainingClient, local: LocalServiceClient
) -> None:
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    near: Any = {"rel": 1e-4, "abs": 1e-5}
    rows = zip(named_steps(training), named_steps(mine), strict=True)
    for (served, step), (expected, local_step) in rows:
        assert served.loss_total == pytest.approx(expected.loss_total, **near)
        assert served.base_loss.grad_norm == pytest.approx(expected.base_loss.grad_norm, **near)
        assert served.cosines == pytest.approx(expected.cosines, **near)
        assert step == pytest.approx(local_step, **near)
        for ours, theirs in zip(served.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            assert ours.keys() == theirs.keys() == {"logprobs", "elementwise_loss"}
            for key, value in theirs.items():
                torch.testing.assert_close(
                    ours[key].to_torch(), value.to_torch(), atol=1e-5, rtol=1e-4
                )


def beat(training: tinker.TrainingClient) -> Any:
    """Send a heartbeat as the SDK does every ten seconds: on its own event loop."""
    holder = training.holder

    async def send() -> None:
        with holder.aclient(ClientConnectionPoolType.SESSION) as client:
            await client.service.session_heartbeat(session_id=holder.get_session_id())

    return holder.run_coroutine_threadsafe(send())


def test_a_slow_term_does_not_delay_a_heartbeat(
    training: tinker.TrainingClient, running: RunningServer
) -> None:
    session = running._state.sessions.get(training.holder.get_session_id())

    def slow(_: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
        before = session.heartbeats
        for _ in range(3):
            beat(training).result(timeout=600)
        assert session.heartbeats == before + 3
        return logprobs[0].sum()

    client = regularize(training)
    spec = RegularizerSpec(slow, weight=1.0, name="slow")
    output = client.forward_backward_custom(DATA, nll, regularizers=[spec]).result()
    assert output.regularizers["slow"].value == pytest.approx(output.regularizer_total)


def test_a_custom_loss_of_the_sdk_delays_heartbeats(
    training: tinker.TrainingClient, running: RunningServer
) -> None:
    """Reason why terms do not run on the event loop of the SDK, as its own custom losses do."""
    session = running._state.sessions.get(training.holder.get_session_id())
    seen = []

    def slow(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        before, sent = session.heartbeats, beat(training)
        threading.Event().wait(0.2)
        seen.append((session.heartbeats - before, sent.future().done()))
        return torch.stack([row.sum() for row in logprobs]).sum(), {}

    training.forward_backward_custom(DATA, slow).result()
    assert seen == [(0, False)]


def test_a_term_can_call_the_client(training: tinker.TrainingClient) -> None:
    client = regularize(training)

    def curious(_: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
        served = client.forward(DATA, "cross_entropy").result()
        mine = torch.cat([row.detach() for row in logprobs])
        theirs = torch.cat([each["logprobs"].to_torch() for each in served.loss_fn_outputs])
        torch.testing.assert_close(mine, theirs)
        return torch.cat(logprobs).mean()

    spec = RegularizerSpec(curious, weight=1.0, name="curious")
    output = client.forward_backward_custom(DATA, nll, regularizers=[spec]).result()
    assert output.regularizers["curious"].value < 0


def test_a_term_that_fails_accumulates_no_gradient(training: tinker.TrainingClient) -> None:
    def broken(_: Any, __: Any) -> torch.Tensor:
        raise ValueError("on purpose")

    client = regularize(training)
    spec = RegularizerSpec(broken, weight=1.0, name="broken")
    with pytest.raises(RuntimeError, match="broken"):
        client.forward_backward_custom(DATA, nll, regularizers=[spec])
    assert client.optim_step(SMALL).result().metrics == {"unclipped_grad_l2:mean": 0.0}
