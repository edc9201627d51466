from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.errors import InputError, NonFiniteError

from .data import LENGTHS, SMALL, close, create, datum, logprobs, ragged, same, squares, train


def test_a_step_called_right_after_a_custom_loss_runs_after_it(service: LocalServiceClient) -> None:
    client = create(service)
    start = client.weights()
    client.forward_backward_custom(ragged(0, [6]), squares)
    metrics = client.optim_step(SMALL).result().metrics
    assert metrics is not None
    assert metrics["unclipped_grad_l2:mean"] > 0
    assert not same(client.weights(), start)


def test_every_async_method_works_in_one_event_loop(service: LocalServiceClient) -> None:
    data = ragged(0, [6, 3])

    async def run() -> tuple[Any, ...]:
        client = await service.create_lora_training_client_async("tiny-random", rank=4, seed=0)
        first = await client.forward_async(data, "cross_entropy")
        second = await client.forward_backward_async(data, "cross_entropy")
        third = await client.forward_backward_custom_async(data, squares)
        step = await client.optim_step_async(SMALL)
        saved = await (await client.save_state_async("state"))
        weights = client.weights()
        sampler = await (await client.save_weights_for_sampler_async("sampler"))
        await (await client.optim_step_async(SMALL))
        await (await client.load_state_async(saved.path))
        assert same(client.weights(), weights)
        await (await client.load_state_with_optimizer_async(saved.path))
        resumed = [
            await service.create_training_client_from_state_async(saved.path),
            await service.create_training_client_from_state_with_optimizer_async(saved.path),
        ]
        samplers = [
            await client.save_weights_and_get_sampling_client_async(),
            await client.create_sampling_client_async(sampler.path),
            await service.create_sampling_client_async(model_path=sampler.path),
        ]
        prompt = types.ModelInput.from_ints([1, 2, 3])
        known = [await one.compute_logprobs_async(prompt) for one in samplers]
        info = await client.get_info_async()
        assert info == client.get_info()
        models = (await service.get_server_capabilities_async()).supported_models
        assert "tiny-random" in {model.model_name for model in models}
        return await first, await second, await third, await step, weights, resumed, known

    first, second, third, step, weights, resumed, known = asyncio.run(run())
    alike = create(service)
    assert first.metrics == second.metrics == alike.forward(data, "cross_entropy").result().metrics
    alike.forward_backward(data, "cross_entropy")
    assert third.metrics == alike.forward_backward_custom(data, squares).result().metrics
    assert step.metrics == alike.optim_step(SMALL).result().metrics
    assert same(alike.weights(), weights)
    assert all(same(client.weights(), weights) for client in resumed)
    assert known[0] == known[1] == known[2]


def test_five_steps_with_one_seed_are_bitwise_equal(tmp_path: Path) -> None:
    found = []
    for run in range(2):
        with LocalServiceClient(checkpoint_dir=tmp_path / str(run)) as service:
            client = create(service, seed=3)
            for step in range(5):
                client.forward_backward(ragged(step, LENGTHS), "cross_entropy")
                client.forward_backward_custom(ragged(step, LENGTHS), squares)
                client.optim_step(SMALL).result()
            found.append(client.weights())
    assert same(*found)


def test_forward_changes_neither_weights_nor_gradients(client: LocalTrainingClient) -> None:
    train(client)
    client.forward_backward(ragged(0, [5]), "cross_entropy").result()
    weights, gradients = client.weights(), client.gradients()
    first = client.forward(ragged(1, LENGTHS), "cross_entropy").result()
    again = client.forward(ragged(1, LENGTHS), "cross_entropy").result()
    assert all(map(torch.equal, logprobs(first), logprobs(again)))
    assert same(client.weights(), weights)
    assert same(client.gradients(), gradients)


def test_a_custom_loss_that_is_cross_entropy_has_its_gradient(precise: LocalTrainingClient) -> None:
    data = ragged(4, LENGTHS)
    precise.forward_backward(data, "cross_entropy").result()
    expected = precise.gradients()
    precise.optim_step(types.AdamParams(learning_rate=0.0)).result()

    def loss(data: list[types.Datum], rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        total = sum((-row * w.to(row)).sum() for row, w in zip(rows, weights, strict=True))
        assert isinstance(total, Tensor)
        return total, {"mine": 4.0}

    metrics = precise.forward_backward_custom(data, loss).result().metrics
    close(precise.gradients(), expected, 1e-11)
    expected_loss = precise.forward(data, "cross_entropy").result().metrics["loss:sum"]
    assert metrics == {
        "mine": 4.0,
        "loss:sum": pytest.approx(expected_loss, rel=1e-7),
        "surrogate_loss:sum": pytest.approx(expected_loss, rel=1e-7),
    }


def test_the_metrics_of_a_custom_loss_are_those_of_the_sdk(precise: LocalTrainingClient) -> None:
    output = precise.forward_backward_custom(ragged(1, [3, 2]), squares).result()
    flat = torch.cat(logprobs(output)).double()
    loss = flat.sum().square() / 1000 + flat.square().sum()
    slope = 2 * flat.sum() / 1000 + 2 * flat
    assert output.metrics == {
        "tokens": 5.0,
        "loss:sum": pytest.approx(float(loss), rel=1e-6),
        "surrogate_loss:sum": pytest.approx(float((slope * flat).sum()), rel=1e-6),
    }


def test_a_datum_that_the_loss_does_not_use_has_no_gradient(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5, 6])
    precise.forward_backward_custom(data, lambda _, rows: (-rows[0].sum(), {})).result()
    expected = precise.gradients()
    precise.optim_step(types.AdamParams(learning_rate=0.0)).result()
    precise.forward_backward_custom(data[:1], lambda _, rows: (-rows[0].sum(), {})).result()
    close(precise.gradients(), expected, 1e-12)


def test_a_custom_loss_may_call_the_client(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5])

    def loss(data: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        output = precise.forward(data, "cross_entropy").result(timeout=600)
        torch.testing.assert_close(
            logprobs(output)[0].to(rows[0]), rows[0].detach(), rtol=0, atol=1e-5
        )
        return squares(data, rows)

    async def run() -> types.ForwardBackwardOutput:
        future = await precise.forward_backward_custom_async(data, loss)
        return await future.result_async()

    assert precise.forward_backward_custom(data, loss).result(timeout=600).metrics["tokens"] == 5.0
    assert asyncio.run(run()).metrics["tokens"] == 5.0


def test_an_async_custom_loss_does_not_block_the_event_loop(
    client: LocalTrainingClient,
) -> None:
    async def run() -> types.ForwardBackwardOutput:
        called, go = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def loss(data: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
            loop.call_soon_threadsafe(called.set)
            assert go.wait(timeout=600)
            return squares(data, rows)

        task = asyncio.create_task(client.forward_backward_custom_async(ragged(0, [4]), loss))
        await called.wait()  # only a loop that goes on gets here
        go.set()
        return await (await task).result_async()

    assert asyncio.run(run()).metrics["tokens"] == 4.0


def test_a_custom_loss_that_fails_accumulates_no_gradient(client: LocalTrainingClient) -> None:
    client.forward_backward(ragged(0, [5]), "cross_entropy").result()
    before = client.gradients()

    def broken(data: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.forward_backward_custom(ragged(0, [5]), broken)
    with pytest.raises(InputError, match=r"must return \(loss, metrics\), got the metrics None"):
        client.forward_backward_custom(ragged(0, [5]), lambda _, rows: (rows[0].sum(), None))  # type: ignore[arg-type,return-value]
    steep = client.forward_backward_custom(
        ragged(0, [5]), lambda _, rows: ((rows[0] - rows[0].detach()).sqrt().sum(), {})
    )
    with pytest.raises(NonFiniteError):
        steep.result()
    assert same(client.gradients(), before)
    client.forward_backward_custom(ragged(0, [5]), squares).result()
    assert not same(client.gradients(), before)


@pytest.mark.parametrize("kind", ["logits", "", 3])
def test_another_loss_type_input_is_an_error(client: LocalTrainingClient, kind: Any) -> None:
    with pytest.raises(
        InputError, match=f"loss_type_input must be 'logprobs' or None, got {kind!r}"
    ):
        client.forward_backward_custom(ragged(0, [5]), squares, loss_type_input=kind)


def traced(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -(logprobs * weights).sum(), {"custom/tokens:sum": weights.sum()}


def test_a_traced_loss_runs(precise: LocalTrainingClient, exact: LocalServiceClient) -> None:
    handle = exact.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    data = ragged(4, LENGTHS)
    metrics = precise.forward_backward_custom(data, handle).result().metrics
    found = precise.gradients()
    precise.optim_step(types.AdamParams(learning_rate=0.0)).result()
    expected = precise.forward_backward(data, "cross_entropy").result().metrics
    close(found, precise.gradients(), 1e-11)
    assert metrics["loss:sum"] == pytest.approx(expected["loss:sum"])
    total = sum(float(one.loss_fn_inputs["weights"].to_torch().sum()) for one in data)
    assert metrics["custom/tokens:sum"] == pytest.approx(total)


def test_a_traced_loss_of_another_service_is_refused(
    precise: LocalTrainingClient, service: LocalServiceClient
) -> None:
    handle = service.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    with pytest.raises(InputError, match="the traced loss 'traced' must come from this service's"):
        precise.forward_backward_custom(ragged(4, [3]), handle)


def test_a_traced_loss_needs_its_fields(
    precise: LocalTrainingClient, exact: LocalServiceClient
) -> None:
    handle = exact.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    with pytest.raises(ValueError, match=r"datum\[0\] has no loss_fn_inputs\['weights'\]"):
        precise.forward_backward_custom([datum([1, 2])], handle)
    with pytest.raises(ValueError, match=r"must take logprobs as its first parameter"):
        exact.create_custom_loss(lambda x: x, {"x": 1})


def test_an_unknown_need_is_an_error_that_lists_the_known(client: LocalTrainingClient) -> None:
    with pytest.raises(InputError, match=r"needs must be among \['hidden_states', 'logits', 'para"):
        client.open_pass(ragged(0, [4]), ("logits", "attentions"))


def test_a_name_for_weights_that_are_not_saved_warns_as_in_the_sdk(trained: Any) -> None:
    with pytest.warns(DeprecationWarning, match="name has no effect"):
        trained.save_weights_and_get_sampling_client("name")
