from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard.engine import LocalServiceClient, LocalTrainingClient

from .data import LENGTHS, by_hand, close, create, ragged, same, squares, train

DATA = ragged(5, [6, 11])
NEEDS = ("logits", "hidden_states", "parameters")


def loss_of_extra_inputs(given: dict[str, Any]) -> Tensor:
    """Loss of all extra inputs, with gradients of many sizes."""
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
    """Gradient of `squares` + `loss_of_extra_inputs`, with plain transformers."""
    leaves = {key: weight.clone().requires_grad_() for key, weight in weights.items()}
    given: dict[str, Any] = {"logits": [], "hidden_states": [], "parameters": leaves}
    rows = []
    for one in data:
        output = by_hand(leaves, one.model_input.to_ints(), output_hidden_states=True)
        given["logits"].append(output.logits[0])
        given["hidden_states"].append({i: h[0] for i, h in enumerate(output.hidden_states)})
        targets = one.loss_fn_inputs["target_tokens"].to_torch()[:, None]
        rows.append(output.logits[0].log_softmax(-1).gather(-1, targets)[:, 0])
    total = squares(data, rows)[0] + loss_of_extra_inputs(given)
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


def backward_through_pass(client: LocalTrainingClient, data: list[types.Datum]) -> None:
    """Accumulate the same gradient through `open_pass`."""
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
    (squares(data, rows)[0] + loss_of_extra_inputs(given)).backward()  # type: ignore[no-untyped-call]
    extra_gradients = {
        "logits": [row.grad for row in given["logits"]],
        "hidden_states": [
            {layer: row.grad for layer, row in states.items()} for states in given["hidden_states"]
        ],
        "parameters": {key: weight.grad for key, weight in given["parameters"].items()},
    }
    gradients = [row.grad for row in rows]
    assert all(gradient is not None for gradient in gradients)
    opened.backward([g for g in gradients if g is not None], extra_gradients).result()


def test_a_pass_for_evaluation_keeps_no_graph(precise: LocalTrainingClient) -> None:
    kept, free = (precise.open_pass(DATA, NEEDS, keep_graph=keep) for keep in (True, False))
    assert kept._opened.results is not None
    assert free._opened.results is None
    for ours, theirs in zip(free.logprobs, kept.logprobs, strict=True):
        assert torch.equal(ours, theirs)
    gradients = [torch.ones_like(row) for row in free.logprobs]
    free.backward(gradients).result()  # runs forward again
    found = precise.gradients()
    precise.optim_step(types.AdamParams(learning_rate=0.0)).result()
    kept.backward(gradients).result()
    close(found, precise.gradients(), 1e-10)


def test_the_outputs_of_a_pass_are_those_of_transformers(precise: LocalTrainingClient) -> None:
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
def test_the_gradients_of_a_pass_are_those_of_autograd(
    exact: LocalServiceClient, in_parts: LocalServiceClient, parts: bool
) -> None:
    client = create(in_parts if parts else exact)
    train(client)
    data = ragged(4, LENGTHS)
    backward_through_pass(client, data)
    close(client.gradients(), by_autograd(client.weights(), data), 1e-10)


def test_a_pass_split_into_packings_has_the_same_outputs(
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


def test_two_backward_passes_accumulate_twice_the_gradient(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5, 3])
    opened = precise.open_pass(data)
    gradients = [torch.ones(5), torch.arange(3.0)]
    opened.backward(gradients).result()
    once = precise.gradients()
    opened.backward(gradients).result()
    close(precise.gradients(), {key: 2 * value for key, value in once.items()}, 1e-12)


def test_none_in_place_of_a_gradient_counts_as_zeros(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5, 3])
    still = [torch.zeros(5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    gradient = torch.randn(3, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    opened = precise.open_pass(data, ("logits", "hidden_states"))
    none: Any = [{0: None, 1: None, 2: None}] * 2
    opened.backward(still, {"logits": [None, gradient], "hidden_states": none}).result()
    found = precise.gradients()
    leaves = {key: weight.requires_grad_() for key, weight in precise.weights().items()}
    rows = by_hand(leaves, data[1].model_input.to_ints()).logits[0]
    expected = torch.autograd.grad((rows * gradient).sum(), list(leaves.values()))
    close(found, dict(zip(leaves, expected, strict=True)), 1e-10)


def test_a_gradient_of_the_embeddings_reaches_no_weight(precise: LocalTrainingClient) -> None:
    data = ragged(4, [5])
    opened = precise.open_pass(data, ("hidden_states",))
    gradients: Any = [{0: torch.ones(5, 64), 1: None, 2: None}]
    opened.backward([torch.zeros(5)], {"hidden_states": gradients}).result()
    assert not any(bool(gradient.any()) for gradient in precise.gradients().values())


def test_the_outputs_of_a_pass_have_no_graph(precise: LocalTrainingClient) -> None:
    opened = precise.open_pass(ragged(4, [5]), NEEDS)
    assert opened.given.keys() == set(NEEDS)
    assert not opened.logprobs[0].requires_grad
    assert not opened.given["logits"][0].requires_grad
    assert not opened.given["hidden_states"][0][2].requires_grad
    assert not any(weight.requires_grad for weight in opened.given["parameters"].values())
    assert precise.open_pass(ragged(4, [5])).given == {}


def test_two_clients_may_have_open_passes_at_once(alone: LocalServiceClient) -> None:
    clients = [create(alone, rank=2), create(alone, rank=5, seed=1)]
    expected = []
    gradients = [torch.ones(6), torch.arange(11.0)]
    for client in clients:
        train(client)
        client.open_pass(DATA).backward(gradients).result()
        expected.append(client.gradients())
        client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    passes = [client.open_pass(DATA) for client in clients]
    sampling = alone.create_sampling_client(base_model="tiny-random")
    sampling.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()
    for opened in passes:
        opened.backward(gradients).result()
    for client, wanted in zip(clients, expected, strict=True):
        assert same(client.gradients(), wanted)


def test_an_open_pass_survives_the_creation_and_removal_of_other_clients(
    alone: LocalServiceClient,
) -> None:
    client = create(alone)
    train(client)
    client.open_pass(DATA).backward([torch.ones(6), torch.ones(11)]).result()
    expected = client.gradients()
    client.optim_step(types.AdamParams(learning_rate=0.0)).result()
    opened = client.open_pass(DATA)
    sampling = client.save_weights_and_get_sampling_client()
    sampling.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()
    del sampling
    gc.collect()
    opened.backward([torch.ones(6), torch.ones(11)]).result()
    assert same(client.gradients(), expected)
