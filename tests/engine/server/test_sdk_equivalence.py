"""Every method of the SDK over a real connection gives the result of the engine's own client."""

from __future__ import annotations

import asyncio
from typing import Any

import tinker
import torch
from tinker import types

from steelyard.engine import LocalServiceClient
from tests.engine.data import SMALL, datum, ragged

from .comparison import PROMPT, assert_alike, to_plain, traced_loss


def squares(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    loss = sum((row * row).sum() for row in logprobs)
    return torch.as_tensor(loss), {"rows": float(len(logprobs))}


POLICY = [
    datum([1, 2, 3], logprobs=[-6.0, -6.5, -6.2], advantages=[1.0, -1.0, 0.5]),
    datum([4, 5], logprobs=[-6.0, -6.1], advantages=[0.3, 0.0]),
]


def run_every_method(service: Any) -> list[Any]:
    """Results of every method, called one after the other."""
    training = service.create_lora_training_client("tiny-random", rank=4, seed=3)
    results: list[Any] = [
        training.get_info().model_dump(include={"is_lora", "lora_rank", "model_name"})
    ]
    results.append(training.forward(ragged(0, [9, 4]), "cross_entropy").result())
    results.append(training.forward_backward(ragged(0, [9, 4]), "cross_entropy").result())
    results.append(training.forward_backward(ragged(1, [5, 3, 7], 3), "cross_entropy").result())
    results.append(training.optim_step(SMALL).result())
    losses = ("importance_sampling", "ppo", "cispo", "dro")
    results += [training.forward_backward(POLICY, loss).result() for loss in losses]
    results.append(training.forward_backward(POLICY, "ppo", {"clip_low_threshold": 0.99}).result())
    results.append(
        training.optim_step(types.AdamParams(learning_rate=0.02, grad_clip_norm=1.0)).result()
    )
    results.append(training.forward_backward_custom(ragged(2, [6, 2]), squares).result())
    handle = service.create_custom_loss(traced_loss, {"logprobs": 1, "weights": 1}).result()
    results.append(training.forward_backward_custom(ragged(3, [6, 2]), handle).result())
    results.append(training.optim_step(SMALL).result())
    results.append(training.forward(ragged(0, [9, 4]), "cross_entropy").result())
    params = types.SamplingParams(max_tokens=5, seed=7, temperature=0.7, top_p=0.9)
    sampling = training.save_weights_and_get_sampling_client()
    targets = torch.tensor([[1, -1], [2, 3], [4, 5]])
    results.append(
        sampling.sample(
            PROMPT, 2, params, True, 2, 3, types.TensorData.from_torch(targets), 2, 2
        ).result()
    )
    results.append(sampling.compute_logprobs(PROMPT).result())
    state = training.save_state("state").result().path
    results.append(training.forward_backward(ragged(5, [4]), "cross_entropy").result())
    results.append(training.optim_step(SMALL).result())
    saved = training.save_weights_for_sampler("sampler").result().path
    results.append(
        service.create_sampling_client(model_path=saved).sample(PROMPT, 1, params).result()
    )
    results.append(training.create_sampling_client(saved).compute_logprobs(PROMPT).result())
    results.append(
        service.create_sampling_client(base_model="tiny-random").sample(PROMPT, 1, params).result()
    )
    for resumed in (
        service.create_training_client_from_state(state),
        service.create_training_client_from_state_with_optimizer(state),
    ):
        results.append(resumed.forward_backward(ragged(6, [5]), "cross_entropy").result())
        results.append(resumed.optim_step(SMALL).result())
        results.append(resumed.forward(ragged(0, [9, 4]), "cross_entropy").result())
    return [to_plain(each) for each in results]


async def run_every_async_method(service: Any) -> list[Any]:
    """Results of every async method; some requests are sent before the last has a result."""
    training = await service.create_lora_training_client_async("tiny-random", rank=4, seed=3)
    futures = [
        await training.forward_async(ragged(0, [9, 4]), "cross_entropy"),
        await training.forward_backward_async(ragged(0, [9, 4], 2), "cross_entropy"),
        await training.optim_step_async(SMALL),
    ]
    results = [(await training.get_info_async()).lora_rank]
    results += [await future for future in futures]
    results.append(await (await training.forward_backward_custom_async(ragged(2, [6]), squares)))
    results.append(await (await training.optim_step_async(SMALL)))
    params = types.SamplingParams(max_tokens=3, seed=7)
    sampling = await training.save_weights_and_get_sampling_client_async()
    results += await asyncio.gather(*(sampling.sample_async(PROMPT, 1, params) for _ in range(3)))
    results.append(await sampling.compute_logprobs_async(PROMPT, 2))
    state = (await (await training.save_state_async("state"))).path
    saved = (await (await training.save_weights_for_sampler_async("sampler"))).path
    again = await service.create_sampling_client_async(model_path=saved)
    results.append(await again.sample_async(PROMPT, 1, params))
    results.append(
        await (await training.create_sampling_client_async(saved)).compute_logprobs_async(PROMPT)
    )
    for create in (
        service.create_training_client_from_state_async,
        service.create_training_client_from_state_with_optimizer_async,
    ):
        resumed = await create(state)
        results.append(
            await (await resumed.forward_backward_async(ragged(6, [5]), "cross_entropy"))
        )
        results.append(await (await resumed.optim_step_async(SMALL)))
        results.append(await (await resumed.forward_async(ragged(0, [9]), "cross_entropy")))
    return [to_plain(each) for each in results]


def test_every_method_gives_the_result_of_the_local_client(
    sdk: tinker.ServiceClient, local: LocalServiceClient
) -> None:
    actual, expected = run_every_method(sdk), run_every_method(local)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_alike(ours, theirs)


def test_every_async_method_gives_the_result_of_the_local_client(
    sdk: tinker.ServiceClient, local: LocalServiceClient
) -> None:
    holder = sdk.holder  # made outside the loop, as the SDK wants it
    actual, expected = (
        asyncio.run(run_every_async_method(sdk)),
        asyncio.run(run_every_async_method(local)),
    )
    assert holder is sdk.holder
    for ours, theirs in zip(actual, expected, strict=True):
        assert_alike(ours, theirs)


def test_pipelined_requests_run_in_order(
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
            actual = results
    for ours, theirs in zip(actual, results, strict=True):
        assert_alike(to_plain(ours), to_plain(theirs))
