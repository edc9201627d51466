from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard.engine import LocalServiceClient, LocalTrainingClient
from steelyard.errors import ClosedError, InputError, NonFiniteError

from .data import SMALL, by_hand, close, datum, logprobs, ragged, same, train

LENGTHS = [9, 4, 14, 1, 7]


def create(service: LocalServiceClient, seed: int = 0) -> LocalTrainingClient:
    return service.create_lora_training_client("tiny-random", rank=4, seed=seed)


@pytest.fixture
def precise(exact: LocalServiceClient) -> LocalTrainingClient:
    client = create(exact)
    train(client)
    return client


@pytest.fixture(scope="module")
def in_parts() -> Iterator[LocalServiceClient]:
    """Ten tokens at a time: less than the longest datum, and a few of the short ones."""
    with LocalServiceClient(dtype="float64", max_tokens=10) as service:
        yield service


def squares(data: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """A loss of one's own that is no sum over tokens."""
    flat = torch.cat([row.flatten() for row in rows])
    return flat.sum().square() / 1000 + flat.square().sum(), {"tokens": float(len(flat))}


# Futures and order.


def test_a_future_can_be_waited_for_in_every_way(client: LocalTrainingClient) -> None:
    data = ragged(0, [5])
    expected = client.forward(data, "cross_entropy").result(timeout=600).metrics

    async def ways() -> list[dict[str, float]]:
        future = client.forward(data, "cross_entropy")
        awaited = await client.forward(data, "cross_entropy")
        return [(await future.result_async(timeout=600)).metrics, awaited.metrics]

    assert asyncio.run(ways()) == [expected, expected]


def test_a_result_that_takes_too_long_can_be_had_later(client: LocalTrainingClient) -> None:
    gate = threading.Event()
    client._worker.submit(gate.wait)
    future = client.forward(ragged(0, [5]), "cross_entropy")
    with pytest.raises(concurrent.futures.TimeoutError):
        future.result(timeout=0.01)
    gate.set()
    assert future.result(timeout=600).metrics["loss:sum"]


def test_calls_run_in_the_order_they_were_made(service: LocalServiceClient) -> None:
    waiting, eager = create(service), create(service)
    for step in range(4):
        waiting.forward_backward(ragged(step, [6, 3]), "cross_entropy").result()
        waiting.optim_step(SMALL).result()
    expected = waiting.forward(ragged(9, [6]), "cross_entropy").result().metrics
    gate = threading.Event()
    eager._worker.submit(gate.wait)
    for step in range(4):
        eager.forward_backward(ragged(step, [6, 3]), "cross_entropy")
        eager.optim_step(SMALL)
    last = eager.forward(ragged(9, [6]), "cross_entropy")
    gate.set()
    assert last.result().metrics == expected
    assert same(eager.weights(), waiting.weights())


def test_a_step_made_right_after_a_custom_loss_comes_after_it(service: LocalServiceClient) -> None:
    client = create(service)
    start = client.weights()
    client.forward_backward_custom(ragged(0, [6]), squares)
    metrics = client.optim_step(SMALL).result().metrics
    assert metrics is not None
    assert metrics["unclipped_grad_l2:mean"] > 0
    assert not same(client.weights(), start)


def test_every_twin_works_in_one_event_loop(service: LocalServiceClient) -> None:
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


def test_five_steps_with_a_seed_are_the_same_bit_for_bit(tmp_path: Path) -> None:
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


def test_forward_leaves_everything_as_it_was(client: LocalTrainingClient) -> None:
    train(client)
    client.forward_backward(ragged(0, [5]), "cross_entropy").result()
    weights, gradients = client.weights(), client.gradients()
    first = client.forward(ragged(1, LENGTHS), "cross_entropy").result()
    again = client.forward(ragged(1, LENGTHS), "cross_entropy").result()
    assert all(map(torch.equal, logprobs(first), logprobs(again)))
    assert same(client.weights(), weights)
    assert same(client.gradients(), gradients)


def test_the_output_is_that_of_transformers(precise: LocalTrainingClient) -> None:
    data = ragged(1, LENGTHS)
    output = precise.forward(data, "cross_entropy").result()
    assert output.loss_fn_output_type == "TorchLossReturn"
    total = 0.0
    for one, found in zip(data, output.loss_fn_outputs, strict=True):
        targets = one.loss_fn_inputs["target_tokens"].to_torch()
        with torch.no_grad():
            rows = by_hand(precise.weights(), one.model_input.to_ints()).logits[0].log_softmax(-1)
        expected = rows.gather(-1, targets[:, None])[:, 0]
        losses = -expected * one.loss_fn_inputs["weights"].to_torch()
        torch.testing.assert_close(
            found["logprobs"].to_torch().double(), expected, rtol=0, atol=1e-5
        )
        torch.testing.assert_close(
            found["elementwise_loss"].to_torch().double(), losses, rtol=0, atol=1e-4
        )
        total += float(losses.sum())
    assert output.metrics == {"loss:sum": pytest.approx(total, rel=1e-7)}


# Micro-batches.


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("custom", [False, True])
def test_parts_give_what_the_whole_gives(
    exact: LocalServiceClient, in_parts: LocalServiceClient, width: int | None, custom: bool
) -> None:
    data = ragged(4, LENGTHS, width)
    found = []
    for service in (exact, in_parts):
        client = create(service)
        train(client)
        if custom:
            output = client.forward_backward_custom(data, squares).result()
        else:
            output = client.forward_backward(data, "cross_entropy").result()
        found.append((client.gradients(), output))
    (whole, expected), (parts, output) = found
    close(parts, whole, 1e-11)
    assert output.metrics == {
        key: pytest.approx(value, rel=1e-10) for key, value in expected.metrics.items()
    }
    for ours, theirs in zip(logprobs(output), logprobs(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_targets_of_several_widths_go_together(precise: LocalTrainingClient) -> None:
    data = [*ragged(1, [5, 3], 2), *ragged(2, [4]), *ragged(3, [6], 5)]
    together = precise.forward_backward(data, "cross_entropy").result()
    whole = precise.gradients()
    precise.optim_step(types.AdamParams(learning_rate=0.0)).result()
    for one, found in zip(data, logprobs(together), strict=True):
        output = precise.forward_backward([one], "cross_entropy").result()
        (alone,) = logprobs(output)
        assert alone.shape == one.loss_fn_inputs["target_tokens"].to_torch().shape
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)
    close(precise.gradients(), whole, 1e-11)


# Custom losses.


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


def test_the_metrics_of_a_custom_loss_are_the_sdks(precise: LocalTrainingClient) -> None:
    output = precise.forward_backward_custom(ragged(1, [3, 2]), squares).result()
    flat = torch.cat(logprobs(output)).double()
    loss = flat.sum().square() / 1000 + flat.square().sum()
    slope = 2 * flat.sum() / 1000 + 2 * flat
    assert output.metrics == {
        "tokens": 5.0,
        "loss:sum": pytest.approx(float(loss), rel=1e-6),
        "surrogate_loss:sum": pytest.approx(float((slope * flat).sum()), rel=1e-6),
    }


def test_a_datum_that_the_loss_does_not_touch_has_no_gradient(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5, 6])
    precise.forward_backward_custom(data, lambda _, rows: (-rows[0].sum(), {})).result()
    expected = precise.gradients()
    precise.optim_step(types.AdamParams(learning_rate=0.0)).result()
    precise.forward_backward_custom(data[:1], lambda _, rows: (-rows[0].sum(), {})).result()
    close(precise.gradients(), expected, 1e-12)


@pytest.mark.parametrize("parts", [False, True])
def test_weights_that_changed_on_the_way_have_the_gradient_of_the_new(
    exact: LocalServiceClient, in_parts: LocalServiceClient, parts: bool
) -> None:
    client = create(in_parts if parts else exact)
    train(client)
    data, seen = ragged(4, LENGTHS), []

    def loss(data: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        seen.append([row.detach() for row in rows])
        client.forward_backward(data, "cross_entropy")
        client.optim_step(SMALL).result()
        return squares(data, rows)

    output = client.forward_backward_custom(data, loss).result()
    found = client.gradients()
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    # By the two passes of a remote client: the old slopes, at the new weights.
    leaves = [row.requires_grad_() for row in seen[0]]
    slopes = torch.autograd.grad(squares(data, leaves)[0], leaves)
    sent = [
        datum(
            one.model_input.to_ints(),
            one.loss_fn_inputs["target_tokens"],
            weights=types.TensorData.from_torch(-slope),
        )
        for one, slope in zip(data, slopes, strict=True)
    ]
    expected = client.forward_backward(sent, "cross_entropy").result()
    close(found, client.gradients(), 1e-6)  # the SDK's weights are float32
    for ours, theirs in zip(logprobs(output), logprobs(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert not torch.allclose(logprobs(output)[0].double(), seen[0][0].detach(), atol=1e-3)


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


def test_a_custom_loss_of_the_twin_does_not_hold_the_event_loop(
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


def test_a_custom_loss_that_fails_leaves_nothing(client: LocalTrainingClient) -> None:
    client.forward_backward(ragged(0, [5]), "cross_entropy").result()
    before = client.gradients()

    def broken(data: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.forward_backward_custom(ragged(0, [5]), broken)
    steep = client.forward_backward_custom(
        ragged(0, [5]), lambda _, rows: ((rows[0] - rows[0].detach()).sqrt().sum(), {})
    )
    with pytest.raises(NonFiniteError):
        steep.result()
    assert same(client.gradients(), before)
    client.forward_backward_custom(ragged(0, [5]), squares).result()
    assert not same(client.gradients(), before)


@pytest.mark.parametrize("kind", ["logits", "", 3])
def test_a_loss_reads_logprobs_alone(client: LocalTrainingClient, kind: Any) -> None:
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


# Beyond log-probs.

NEEDS = ("logits", "hidden_states", "parameters")


def beyond(given: dict[str, Any]) -> Tensor:
    """A loss of everything that a pass gives, with slopes of many sizes."""
    total = torch.zeros((), dtype=torch.float64)
    for datum_index, rows in enumerate(given["logits"]):
        total = total + (datum_index + 1) * rows[:, ::7].square().sum() / 100
    for states in given["hidden_states"]:
        for layer, rows in states.items():
            total = total + (layer + 0.5) * rows.pow(3).sum() / 10
    for key, weight in given["parameters"].items():
        total = total + len(key) * weight.square().sum() / 50
    return total


def by_autograd(weights: dict[str, Tensor], data: list[types.Datum]) -> dict[str, Tensor]:
    """The gradient of `squares` + `beyond`, with plain transformers."""
    leaves = {key: weight.clone().requires_grad_() for key, weight in weights.items()}
    given: dict[str, Any] = {"logits": [], "hidden_states": [], "parameters": leaves}
    rows = []
    for one in data:
        output = by_hand(leaves, one.model_input.to_ints(), output_hidden_states=True)
        given["logits"].append(output.logits[0])
        given["hidden_states"].append({i: h[0] for i, h in enumerate(output.hidden_states)})
        targets = one.loss_fn_inputs["target_tokens"].to_torch()[:, None]
        rows.append(output.logits[0].log_softmax(-1).gather(-1, targets)[:, 0])
    total = squares(data, rows)[0] + beyond(given)
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def pulled(client: LocalTrainingClient, data: list[types.Datum]) -> None:
    """The same through `open_pass`."""
    opened = client.open_pass(data, NEEDS)
    rows = [row.clone().requires_grad_() for row in opened.logprobs]
    given: dict[str, Any] = {
        "logits": [row.clone().requires_grad_() for row in opened.given["logits"]],
        "hidden_states": [
            {layer: row.clone().requires_grad_() for layer, row in states.items()}
            for states in opened.given["hidden_states"]
        ],
        "parameters": {
            key: weight.clone().requires_grad_()
            for key, weight in opened.given["parameters"].items()
        },
    }
    (squares(data, rows)[0] + beyond(given)).backward()  # type: ignore[no-untyped-call]
    pulls = {
        "logits": [row.grad for row in given["logits"]],
        "hidden_states": [
            {layer: row.grad for layer, row in states.items()} for states in given["hidden_states"]
        ],
        "parameters": {key: weight.grad for key, weight in given["parameters"].items()},
    }
    gradients = [row.grad for row in rows]
    assert all(gradient is not None for gradient in gradients)
    opened.backward([g for g in gradients if g is not None], pulls).result()


def test_a_pass_gives_what_transformers_gives(precise: LocalTrainingClient) -> None:
    data = ragged(4, LENGTHS)
    opened = precise.open_pass(data, NEEDS)
    assert same(opened.given["parameters"], precise.weights())
    for i, one in enumerate(data):
        with torch.no_grad():
            output = by_hand(
                precise.weights(), one.model_input.to_ints(), output_hidden_states=True
            )
        assert opened.given["logits"][i].shape == (LENGTHS[i], 512)
        torch.testing.assert_close(opened.given["logits"][i], output.logits[0], rtol=0, atol=1e-9)
        states = opened.given["hidden_states"][i]
        assert list(states) == [0, 1, 2]
        for layer, rows in states.items():
            assert rows.shape == (LENGTHS[i], 64)
            torch.testing.assert_close(rows, output.hidden_states[layer][0], rtol=0, atol=1e-9)
        targets = one.loss_fn_inputs["target_tokens"].to_torch()[:, None]
        expected = output.logits[0].log_softmax(-1).gather(-1, targets)[:, 0]
        torch.testing.assert_close(opened.logprobs[i], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("parts", [False, True])
def test_a_pass_pulls_as_autograd_does(
    exact: LocalServiceClient, in_parts: LocalServiceClient, parts: bool
) -> None:
    client = create(in_parts if parts else exact)
    train(client)
    data = ragged(4, LENGTHS)
    pulled(client, data)
    close(client.gradients(), by_autograd(client.weights(), data), 1e-10)


def test_a_pass_in_parts_gives_what_the_whole_gives(
    exact: LocalServiceClient, in_parts: LocalServiceClient
) -> None:
    data = ragged(4, LENGTHS)
    opened = []
    for service in (exact, in_parts):
        client = create(service)
        train(client)
        opened.append(client.open_pass(data, NEEDS))
    whole, parts = (one.given for one in opened)
    for i in range(len(data)):
        torch.testing.assert_close(parts["logits"][i], whole["logits"][i], rtol=0, atol=1e-10)
        for layer, rows in whole["hidden_states"][i].items():
            torch.testing.assert_close(parts["hidden_states"][i][layer], rows, rtol=0, atol=1e-10)
    torch.testing.assert_close(opened[1].logprobs, opened[0].logprobs, rtol=0, atol=1e-10)


def test_a_pass_may_go_back_twice(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5, 3])
    opened = precise.open_pass(data)
    pulls = [torch.ones(5), torch.arange(3.0)]
    opened.backward(pulls).result()
    once = precise.gradients()
    opened.backward(pulls).result()
    close(precise.gradients(), {key: 2 * value for key, value in once.items()}, 1e-12)


def test_what_does_not_pull_may_be_none(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5, 3])
    still = [torch.zeros(5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    pull = torch.randn(3, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    opened = precise.open_pass(data, ("logits", "hidden_states"))
    none: Any = [{0: None, 1: None, 2: None}] * 2
    opened.backward(still, {"logits": [None, pull], "hidden_states": none}).result()
    found = precise.gradients()
    leaves = {key: weight.requires_grad_() for key, weight in precise.weights().items()}
    rows = by_hand(leaves, data[1].model_input.to_ints()).logits[0]
    expected = torch.autograd.grad((rows * pull).sum(), list(leaves.values()))
    close(found, dict(zip(leaves, expected, strict=True)), 1e-10)


def test_the_embeddings_lead_to_no_weights(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5])
    opened = precise.open_pass(data, ("hidden_states",))
    pulls: Any = [{0: torch.ones(5, 64), 1: None, 2: None}]
    opened.backward([torch.zeros(5)], {"hidden_states": pulls}).result()
    assert not any(bool(gradient.any()) for gradient in precise.gradients().values())


def test_what_a_pass_gives_is_without_a_graph(precise: LocalTrainingClient) -> None:
    opened = precise.open_pass(ragged(4, [5]), NEEDS)
    assert opened.given.keys() == set(NEEDS)
    assert not opened.logprobs[0].requires_grad
    assert not opened.given["logits"][0].requires_grad
    assert not opened.given["hidden_states"][0][2].requires_grad
    assert not any(weight.requires_grad for weight in opened.given["parameters"].values())
    assert precise.open_pass(ragged(4, [5])).given == {}


def test_an_unknown_need_is_an_error_that_lists_the_known(client: LocalTrainingClient) -> None:
    with pytest.raises(InputError, match=r"needs must be among \['hidden_states', 'logits', 'para"):
        client.open_pass(ragged(0, [4]), ("logits", "attentions"))


# Closing.


def test_a_closed_service_finishes_what_was_begun_and_refuses_the_rest(tmp_path: Path) -> None:
    service = LocalServiceClient(checkpoint_dir=tmp_path)
    client = create(service)
    began = threading.Event()
    gate = threading.Event()

    def work() -> str:
        began.set()
        gate.wait()
        return "done"

    first = client._worker.submit(work)
    began.wait()
    second = client.optim_step(SMALL)
    closing = threading.Thread(target=lambda: service.close("success").result())
    closing.start()
    gate.set()
    closing.join()
    assert first.result() == "done"
    with pytest.raises(concurrent.futures.CancelledError):
        second.result()
    for call in (
        lambda: client.forward(ragged(0, [4]), "cross_entropy"),
        lambda: client.optim_step(SMALL),
        lambda: client.forward_backward_custom(ragged(0, [4]), squares),
        lambda: client.save_state("a"),
        client.weights,
        lambda: create(service),
        lambda: service.create_sampling_client(base_model="tiny-random"),
    ):
        with pytest.raises(ClosedError, match="the service must be open, got a closed one"):
            call()
    service.close("success").result()


def test_a_service_is_closed_at_the_end_of_its_block() -> None:
    with LocalServiceClient() as service:
        client = create(service)
    with pytest.raises(ClosedError):
        client.optim_step(SMALL)
