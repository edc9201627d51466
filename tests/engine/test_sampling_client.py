from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import torch
from tinker import types

from steelyard.engine import LocalSamplingClient, LocalServiceClient
from steelyard.errors import InputError

from .data import create, datum, folder_of, logprobs, prompt, sample, saved, train


def test_a_client_of_saved_weights_has_the_logprobs_of_the_training_client(
    service: LocalServiceClient, trained: Any
) -> None:
    path = trained.save_weights_for_sampler("s").result().path
    assert path == f"tinker://{trained.model_id}/sampler_weights/s"
    assert not (folder_of(service, path) / "optimizer.safetensors").exists()
    prompt = types.ModelInput.from_ints([1, 2, 3, 4])
    output = trained.forward([datum([1, 2, 3], [2, 3, 4])], "cross_entropy").result()
    expected = [None, *logprobs(output)[0].tolist()]
    for sampling in (
        service.create_sampling_client(model_path=path),
        service.create_sampling_client(model_path=path, base_model="tiny-random"),
        trained.create_sampling_client(path),
        service.create_sampling_client(model_path=saved(trained)),
    ):
        assert sampling.compute_logprobs(prompt).result() == pytest.approx(expected, abs=1e-5)


def test_a_sampling_client_keeps_the_weights_it_was_made_with(alone: LocalServiceClient) -> None:
    client = create(alone)
    train(client)
    sampling = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    before = sampling.compute_logprobs(prompt).result()
    train(client)
    assert sampling.compute_logprobs(prompt).result() == before


def test_async_methods_return_the_same_as_sync_methods(sampling: LocalSamplingClient) -> None:
    params = types.SamplingParams(max_tokens=5, seed=3)

    async def both() -> tuple[types.SampleResponse, list[float | None]]:
        sampled, known = await asyncio.gather(
            sampling.sample_async(prompt(), 2, params, include_prompt_logprobs=True),
            sampling.compute_logprobs_async(prompt(), prompt_logprobs_last_n=2),
        )
        return sampled, known

    sampled, known = asyncio.run(both())
    expected = sampling.sample(prompt(), 2, params, include_prompt_logprobs=True).result()
    assert [s.tokens for s in sampled.sequences] == [s.tokens for s in expected.sequences]
    assert sampled.prompt_logprobs == expected.prompt_logprobs
    assert known == sampling.compute_logprobs(prompt(), 2).result()
    assert asyncio.run(sampling.get_base_model_async()) == "tiny-random"


TARGETS = types.TensorData.from_torch(torch.zeros(2, 1, dtype=torch.int64))


ABOVE = types.TensorData.from_torch(torch.full((3, 1), 512))


BELOW = types.TensorData.from_torch(torch.full((3, 1), -2))


REAL = types.TensorData.from_torch(torch.zeros(3, 1))


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"max_tokens": 0}, {}, "max_tokens must be"),
        ({"max_tokens": -3}, {}, "max_tokens must be"),
        ({"temperature": -0.1}, {}, "temperature must be a finite number >= 0, got -0.1"),
        ({"temperature": math.nan}, {}, "temperature must be a finite number >= 0, got nan"),
        ({"top_p": 0.0}, {}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, {}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"top_p": math.nan}, {}, "top_p must be above 0 and at most 1, got nan"),
        ({"top_k": 0}, {}, "top_k must be a whole number >= 1, or -1 for all, got 0"),
        ({"top_k": -2}, {}, "top_k must be a whole number >= 1, or -1 for all, got -2"),
        ({"seed": 2**64}, {}, "seed must be a whole number from"),
        ({}, {"topk_prompt_logprobs": -1}, "topk_prompt_logprobs must be a whole number from 0"),
        ({}, {"topk_sample_logprobs": 513}, "topk_sample_logprobs must be a whole number from 0"),
        ({}, {"prompt_alt_tokens_k": 1.5}, "prompt_alt_tokens_k must be a whole number from 0"),
        ({}, {"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n needs include_prompt_logprobs"),
        (
            {},
            {"prompt_logprobs_last_n": 4, "include_prompt_logprobs": True},
            "prompt_logprobs_last_n must be a whole number from 1 to 3.*got 4",
        ),
        (
            {},
            {"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True},
            "prompt_logprobs_last_n must be a whole number from 1 to 3.*got 0",
        ),
        (
            {},
            {"target_prompt_logprobs": TARGETS},
            r"target_prompt_logprobs must have the shape .* = \[3, K\], got \[2, 1\]",
        ),
        ({}, {"target_prompt_logprobs": ABOVE}, "target_prompt_logprobs must hold .* got 512"),
        ({}, {"target_prompt_logprobs": BELOW}, "target_prompt_logprobs must hold .* got -2"),
        ({}, {"target_prompt_logprobs": REAL}, "target_prompt_logprobs must be whole numbers"),
    ],
)
def test_bad_settings_are_an_error(
    sampling: LocalSamplingClient, params: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        sample(sampling, options=options, **params)
    assert sample(sampling).sequences


@pytest.mark.parametrize("count", [0, -1, 1.5, True, 4097, 10**9])
def test_a_bad_number_of_samples_is_an_error(sampling: LocalSamplingClient, count: Any) -> None:
    rule = "num_samples must be a whole number from 1 to 4096"
    with pytest.raises(InputError, match=f"{rule}, got {count!r}"):
        sample(sampling, count=count)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "prompt must hold 1 to 512 tokens"),
        ([1] * 513, "prompt must hold 1 to 512 tokens"),
        ([1] * 512, "prompt must leave room for at least one token"),
        ([1, 512], "prompt must hold tokens from 0 to 511"),
        ([1, -1], "prompt must hold tokens from 0 to 511"),
    ],
)
def test_a_bad_prompt_is_an_error(
    sampling: LocalSamplingClient, tokens: list[int], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        sample(sampling, tokens)


def test_a_prompt_that_fills_the_context_has_logprobs(sampling: LocalSamplingClient) -> None:
    found = sampling.compute_logprobs(prompt([1] * 512)).result()
    assert len(found) == 512
    with pytest.raises(InputError, match="prompt_logprobs_last_n must be"):
        sampling.compute_logprobs(prompt([1]), 1)
    with pytest.raises(InputError, match="prompt must hold 1 to 512 tokens"):
        sampling.compute_logprobs(prompt([1] * 513))


def test_a_list_is_checked_before_anything_is_sampled(sampling: LocalSamplingClient) -> None:
    good, bad = types.SamplingParams(max_tokens=2), types.SamplingParams(max_tokens=0)
    with pytest.raises(InputError, match=r"request 1: max_tokens must be .* got 0"):
        sampling.sample_list([(prompt(), 1, good), (prompt(), 1, bad)])
    with pytest.raises(InputError, match="request 0: prompt must hold 1 to 512 tokens"):
        sampling.sample_list([(prompt([1] * 513), 1, good)])
    with pytest.raises(InputError, match="request 0: prompt must leave room"):
        sampling.sample_list([(prompt([1] * 512), 1, good)])


def test_a_stream_yields_the_tokens_of_a_sample(sampling: LocalSamplingClient) -> None:
    params = types.SamplingParams(max_tokens=12, seed=5)
    expected = [
        sampling.sample(prompt(tokens), 1, params).result().sequences[0].tokens
        for tokens in ([1, 2], [3, 4, 5])
    ]
    streams = [sampling.stream(prompt(tokens), params) for tokens in ([1, 2], [3, 4, 5])]
    turns = [[next(stream, None) for stream in streams] for _ in range(13)]
    found = [
        [token for token in column if token is not None] for column in zip(*turns, strict=True)
    ]
    assert found == expected


def test_a_stream_ends_at_a_stop_token(sampling: LocalSamplingClient) -> None:
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
    first, second, *_ = sampling.stream(prompt([1, 2, 3]), greedy)
    stop = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[second])
    expected = [first] if first == second else [first, second]
    assert list(sampling.stream(prompt([1, 2, 3]), stop)) == expected


def test_a_stream_checks_its_arguments_at_once(sampling: LocalSamplingClient) -> None:
    with pytest.raises(InputError, match="temperature must be"):
        sampling.stream(prompt([1]), types.SamplingParams(temperature=-1.0))
