"""The real SDK over a real connection, beside the engine's own client: the same code, both ways."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from steelyard.engine import LocalServiceClient
from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import SMALL, datum, ragged

PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])


def plain(value: Any) -> Any:  # noqa: PLR0911 - one for each kind
    """A result as numbers, strings and lists of them, without what differs between runs."""
    if isinstance(value, types.ForwardBackwardOutput):
        return [value.loss_fn_output_type, plain(value.loss_fn_outputs), plain(value.metrics)]
    if isinstance(value, types.TensorData):
        return [value.dtype, list(value.to_numpy().shape), value.to_numpy()]
    if isinstance(value, types.SampledSequence):
        logprobs = np.array(value.logprobs)
        return [value.stop_reason, value.tokens, logprobs, plain(value.topk_logprobs)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not field.name.startswith("_")
        }
    if isinstance(value, types.OptimStepResponse):
        return plain(value.metrics)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def alike(ours: Any, theirs: Any) -> None:
    """Fail unless two results are the same, numbers to 1e-5."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key, each in theirs.items():
            alike(ours[key], each)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            alike(mine, other)
    elif isinstance(theirs, float | np.ndarray):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    else:
        assert ours == theirs


def weighed(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = sum((row * row).sum() for row in logprobs)
    return torch.as_tensor(loss), {"rows": float(len(logprobs))}


def traced(
    logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = torch.exp(logprobs - logprobs.detach())
    loss = -(torch.clamp(ratio, 0.8, 1.2) * weights).sum() + logprobs.square().mean()
    return loss, {"custom/entropy:mean": -logprobs.mean(), "custom/tokens:sum": weights.sum()}


POLICY = [
    datum([1, 2, 3], logprobs=[-6.0, -6.5, -6.2], advantages=[1.0, -1.0, 0.5]),
    datum([4, 5], logprobs=[-6.0, -6.1], advantages=[0.3, 0.0]),
]


def story(service: Any) -> list[Any]:
    """Every verb, one after the other."""
    training = service.create_lora_training_client("tiny-random", rank=4, seed=3)
    told: list[Any] = [
        training.get_info().model_dump(include={"is_lora", "lora_rank", "model_name"})
    ]
    told.append(training.forward(ragged(0, [9, 4]), "cross_entropy").result())
    told.append(training.forward_backward(ragged(0, [9, 4]), "cross_entropy").result())
    told.append(training.forward_backward(ragged(1, [5, 3, 7], 3), "cross_entropy").result())
    told.append(training.optim_step(SMALL).result())
    losses = ("importance_sampling", "ppo", "cispo", "dro")
    told += [training.forward_backward(POLICY, loss).result() for loss in losses]
    told.append(training.forward_backward(POLICY, "ppo", {"clip_low_threshold": 0.99}).result())
    told.append(
        training.optim_step(types.AdamParams(learning_rate=0.02, grad_clip_norm=1.0)).result()
    )
    told.append(training.forward_backward_custom(ragged(2, [6, 2]), weighed).result())
    handle = service.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    told.append(training.forward_backward_custom(ragged(3, [6, 2]), handle).result())
    told.append(training.optim_step(SMALL).result())
    told.append(training.forward(ragged(0, [9, 4]), "cross_entropy").result())
    params = types.SamplingParams(max_tokens=5, seed=7, temperature=0.7, top_p=0.9)
    sampling = training.save_weights_and_get_sampling_client()
    targets = torch.tensor([[1, -1], [2, 3], [4, 5]])
    told.append(
        sampling.sample(
            PROMPT, 2, params, True, 2, 3, types.TensorData.from_torch(targets), 2, 2
        ).result()
    )
    told.append(sampling.compute_logprobs(PROMPT).result())
    state = training.save_state("state").result().path
    told.append(training.forward_backward(ragged(5, [4]), "cross_entropy").result())
    told.append(training.optim_step(SMALL).result())
    saved = training.save_weights_for_sampler("sampler").result().path
    told.append(service.create_sampling_client(model_path=saved).sample(PROMPT, 1, params).result())
    told.append(training.create_sampling_client(saved).compute_logprobs(PROMPT).result())
    told.append(
        service.create_sampling_client(base_model="tiny-random").sample(PROMPT, 1, params).result()
    )
    for resumed in (
        service.create_training_client_from_state(state),
        service.create_training_client_from_state_with_optimizer(state),
    ):
        told.append(resumed.forward_backward(ragged(6, [5]), "cross_entropy").result())
        told.append(resumed.optim_step(SMALL).result())
        told.append(resumed.forward(ragged(0, [9, 4]), "cross_entropy").result())
    return [plain(each) for each in told]


async def async_story(service: Any) -> list[Any]:
    """Every verb, awaited, with the next request sent before the last is answered."""
    training = await service.create_lora_training_client_async("tiny-random", rank=4, seed=3)
    futures = [
        await training.forward_async(ragged(0, [9, 4]), "cross_entropy"),
        await training.forward_backward_async(ragged(0, [9, 4], 2), "cross_entropy"),
        await training.optim_step_async(SMALL),
    ]
    told = [(await training.get_info_async()).lora_rank]
    told += [await future for future in futures]
    told.append(await (await training.forward_backward_custom_async(ragged(2, [6]), weighed)))
    told.append(await (await training.optim_step_async(SMALL)))
    params = types.SamplingParams(max_tokens=3, seed=7)
    sampling = await training.save_weights_and_get_sampling_client_async()
    told += await asyncio.gather(*(sampling.sample_async(PROMPT, 1, params) for _ in range(3)))
    told.append(await sampling.compute_logprobs_async(PROMPT, 2))
    state = (await (await training.save_state_async("state"))).path
    saved = (await (await training.save_weights_for_sampler_async("sampler"))).path
    again = await service.create_sampling_client_async(model_path=saved)
    told.append(await again.sample_async(PROMPT, 1, params))
    told.append(
        await (await training.create_sampling_client_async(saved)).compute_logprobs_async(PROMPT)
    )
    for create in (
        service.create_training_client_from_state_async,
        service.create_training_client_from_state_with_optimizer_async,
    ):
        resumed = await create(state)
        told.append(await (await resumed.forward_backward_async(ragged(6, [5]), "cross_entropy")))
        told.append(await (await resumed.optim_step_async(SMALL)))
        told.append(await (await resumed.forward_async(ragged(0, [9]), "cross_entropy")))
    return [plain(each) for each in told]


def test_every_verb_gives_what_the_local_client_gives(
    sdk: tinker.ServiceClient, local: LocalServiceClient
) -> None:
    told, expected = story(sdk), story(local)
    for ours, theirs in zip(told, expected, strict=True):
        alike(ours, theirs)


def test_every_verb_awaited_gives_what_the_local_client_gives(
    sdk: tinker.ServiceClient, local: LocalServiceClient
) -> None:
    holder = sdk.holder  # made outside the loop, as the SDK wants it
    told, expected = asyncio.run(async_story(sdk)), asyncio.run(async_story(local))
    assert holder is sdk.holder
    for ours, theirs in zip(told, expected, strict=True):
        alike(ours, theirs)


def test_a_state_is_loaded_into_a_model_that_is_there(
    training: tinker.TrainingClient, local: LocalServiceClient
) -> None:
    path = training.save_state("before").result().path
    before = training.forward(ragged(0, [9]), "cross_entropy").result()
    training.forward_backward(ragged(0, [9]), "cross_entropy").result()
    training.optim_step(SMALL).result()
    changed = training.forward(ragged(0, [9]), "cross_entropy").result()
    assert changed.metrics != before.metrics
    with pytest.warns(FutureWarning, match="load_state"):
        training.load_state(path).result()
    after = training.forward(ragged(0, [9]), "cross_entropy").result()
    assert after.metrics == before.metrics
    with pytest.warns(FutureWarning, match="load_state"):
        training.load_state_with_optimizer(path).result()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_batch_in_parts_is_the_sum_of_its_parts(
    sdk: tinker.ServiceClient, local: LocalServiceClient, compressed: bool
) -> None:
    small = {"fwdbwd_max_chunk_len": 3, "proto_compress_fwdbwd": compressed}
    holder = sdk.holder
    config = holder._client_config.model_copy(update=small)
    holder._client_config = config
    holder._constructor_kwargs["_client_config"] = config
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=1)
    theirs = sdk.create_lora_training_client("tiny-random", rank=4, seed=1)
    data = ragged(4, [5, 9, 2, 7, 3, 3, 8, 1, 6, 4])
    handle = sdk.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    local_handle = local.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    told: list[Any] = []
    expected: list[Any] = []
    for client, loss, into in ((theirs, handle, told), (mine, local_handle, expected)):
        into.append(client.forward_backward(data, "cross_entropy").result())
        into.append(client.forward_backward_custom(data, loss).result())
        into.append(client.optim_step(SMALL).result())
        into.append(client.forward(data, "cross_entropy").result())
    for ours, others in zip(told, expected, strict=True):
        alike(plain(ours), plain(others))
    assert len(told[0].loss_fn_outputs) == 10


def test_sparse_targets_arrive_whole(
    training: tinker.TrainingClient, local: LocalServiceClient
) -> None:
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    targets = torch.randint(1, 512, (6, 8))
    weights = torch.zeros(6, 8)
    weights[2, 1], weights[4, 7] = 0.5, -1.5
    asked: Any = {"target_tokens": targets, "weights": weights}
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3, 4, 5, 6]), loss_fn_inputs=asked
        )
    ]
    assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None, "the SDK packs them"
    for client in (training, mine):
        result = client.forward_backward(data, "cross_entropy").result()
        if client is training:
            told = result
    alike(plain(told), plain(result))
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_torch()
    by_hand = -(0.5 * logprobs[2, 1] - 1.5 * logprobs[4, 7]).item()
    assert told.metrics["loss:sum"] == pytest.approx(by_hand, abs=1e-5)


def test_a_copy_of_a_sampling_client_in_another_place_works(
    training: tinker.TrainingClient,
) -> None:
    sampling = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=3, seed=7)
    copies = [pickle.loads(pickle.dumps(sampling)) for _ in range(2)]
    copies.append(
        tinker.SamplingClient.from_sampler_handle(sampling.get_sampler_handle(), api_key="tml-x")
    )
    expected = sampling.sample(PROMPT, 1, params).result().sequences[0].tokens
    for copy in copies:
        assert copy.sample(PROMPT, 1, params).result().sequences[0].tokens == expected
    assert [copy._cloned_sampler_id for copy in copies] == [1, 2, 3]


def test_the_tokenizer_comes_from_this_machine(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    sampling = sdk.create_sampling_client(base_model="tiny-random")
    for client in (training, sampling):
        tokenizer = client.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("Hej, world")) == "Hej, world"
    named = sampling.get_base_model()
    again = sdk.create_lora_training_client(named, rank=2, seed=0)
    assert again.get_info().model_name == "tiny-random", "the folder is a name of the model too"


def test_a_custom_loss_runs_forward_and_back_once(
    running: RunningServer, sdk: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = sdk.create_lora_training_client("tiny-random", rank=4, seed=0)
    handle = sdk.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is not None
    model = running._state.runs[training.model_id].client._host.model
    calls: list[str] = []
    original = type(model).__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(threading.current_thread().name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "__call__", counted)
    training.forward_backward_custom(ragged(3, [6, 2]), handle).result()
    assert [name.startswith("steelyard-engine") for name in calls] == [True]


def test_requests_are_done_in_the_order_they_were_made(
    training: tinker.TrainingClient, local: LocalServiceClient
) -> None:
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    for client in (training, mine):
        futures: list[Any] = []
        for step in range(6):
            futures.append(client.forward_backward(ragged(step, [4, 3]), "cross_entropy"))
            futures.append(client.optim_step(SMALL))
        results = [future.result() for future in futures]
        if client is training:
            told = results
    for ours, theirs in zip(told, results, strict=True):
        alike(plain(ours), plain(theirs))
