from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from steelyard.engine import (
    LocalSamplingClient,
    LocalServiceClient,
    LocalTrainingClient,
    serve,
    tiny,
)
from .data import PROMPT, datum, distributions, logprobs, prompt, sample

def test_temperature_0_takes_the_likeliest_tokens(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    (found,) = sample(sampling, temperature=0.0, stop=[]).sequences
    tokens = list(PROMPT)
    for token in found.tokens:
        assert token == int(distributions(sampled_training, tokens)[-1].argmax())
        tokens.append(token)
    assert found.stop_reason == "length"
    assert len(found.tokens) == 6


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        ({}, 1.0),
        ({"temperature": 2.0}, 2.0),
        ({"temperature": 0.5}, 0.5),
        # As without: they only choose among the tokens.
        ({"top_k": 5}, 1.0),
        ({"top_p": 0.3}, 1.0),
        ({"temperature": 0.5, "top_k": 5, "top_p": 0.3}, 0.5),
        # The limit has the log-prob 0 for one token, which says nothing.
        ({"temperature": 0.0}, 1.0),
    ],
)
def test_logprobs_of_samples_follow_the_temperature_and_not_top_k_or_top_p(
    sampling: LocalSamplingClient,
    sampled_training: LocalTrainingClient,
    params: dict[str, Any],
    temperature: float,
) -> None:
    options = {"topk_sample_logprobs": 3}
    for found in sample(sampling, count=3, stop=[], options=options, **params).sequences:
        rows = distributions(sampled_training, PROMPT + found.tokens)[len(PROMPT) - 1 : -1]
        rows = (rows / temperature).log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
        np.testing.assert_allclose(found.logprobs or [], expected.numpy(), atol=1e-5)
        likeliest = [[value for _, value in row or ()] for row in found.topk_logprobs or ()]
        np.testing.assert_allclose(likeliest, rows.topk(3).values.numpy(), atol=1e-5)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-30, 1e30, 1e300])
def test_extreme_temperatures_give_finite_logprobs(
    sampling: LocalSamplingClient, temperature: float
) -> None:
    options = {"prompt_alt_tokens_k": 2}
    (found,) = sample(sampling, stop=[], temperature=temperature, options=options).sequences
    if temperature < 1:
        (greedy,) = sample(sampling, stop=[], temperature=0.0).sequences
        assert found.tokens == greedy.tokens
        assert found.logprobs == [0.0] * 6
    else:
        assert found.logprobs == pytest.approx([-math.log(512)] * 6)


# The criterion of tinker-cookbook's tests/validate_temperature_logprobs.py, with the SDK and
# a server too: over all pairs of sampled tokens, |(l_t(i) - l_t(j)) - (l_1(i) - l_1(j)) / t| is
# nearly 0, where l_1 comes from `compute_logprobs`; and a token that is sampled again after the
# same prefix has the log-prob that it had within its sequence.


@pytest.fixture(scope="module", params=["in process", "over HTTP"])
def sampler(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A sampling client of a base model in a local folder."""
    folder = str(tmp_path_factory.mktemp("model"))
    tiny.build(torch.float32).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    if request.param == "in process":
        with LocalServiceClient() as service:
            yield service.create_sampling_client(base_model=folder)
    else:
        with (
            serve(base_model=folder) as url,
            tinker.ServiceClient(base_url=url, api_key="tml-local") as remote,
        ):
            yield remote.create_sampling_client(base_model=folder)


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.0, 1.8])
def test_differences_of_logprobs_scale_with_the_inverse_temperature(
    sampler: Any, temperature: float
) -> None:
    found = sample(sampler, count=12, max_tokens=1, stop=[], temperature=temperature).sequences
    at_t = {each.tokens[0]: each.logprobs[0] for each in found if each.logprobs}
    at_1 = {
        token: sampler.compute_logprobs(prompt([*PROMPT, token])).result()[-1] for token in at_t
    }
    pairs = list(itertools.combinations(at_t, 2))
    assert len(pairs) > 10
    for i, j in pairs:
        assert at_t[i] - at_t[j] == pytest.approx((at_1[i] - at_1[j]) / temperature, abs=1e-4)


def test_a_token_has_the_same_logprob_alone_as_within_its_sequence(sampler: Any) -> None:
    # So cold that the likeliest tokens come again with another seed.
    (found,) = sample(sampler, max_tokens=10, stop=[], temperature=0.05).sequences
    matches = 0
    for i, token in enumerate(found.tokens):
        prefix = PROMPT + found.tokens[:i]
        again = sample(sampler, prefix, 8, max_tokens=1, stop=[], temperature=0.05, seed=1)
        for each in again.sequences:
            if each.tokens == [token]:
                assert each.logprobs == pytest.approx([(found.logprobs or [])[i]], abs=1e-4)
                matches += 1
    assert matches > 5


def test_logprobs_of_samples_are_those_of_the_training_forward_pass(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    (found,) = sample(sampling, stop=[]).sequences
    whole = PROMPT + found.tokens
    output = sampled_training.forward([datum(whole[:-1], whole[1:])], "cross_entropy").result()
    (row,) = logprobs(output)
    np.testing.assert_allclose(found.logprobs or [], row[-6:].numpy(), atol=1e-5)


def test_a_base_model_samples_its_own_likeliest_tokens(exact: LocalServiceClient) -> None:
    sampling = exact.create_sampling_client(base_model="tiny-random")
    fresh = exact.create_lora_training_client("tiny-random", rank=1, seed=0)
    (found,) = sample(sampling, temperature=0.0, stop=[]).sequences
    tokens = list(PROMPT)
    for token in found.tokens:
        assert token == int(distributions(fresh, tokens)[-1].argmax())
        tokens.append(token)


def test_a_seed_gives_the_same_samples_and_another_gives_others(
    sampling: LocalSamplingClient,
) -> None:
    first, again, other = (
        [found.tokens for found in sample(sampling, count=3, seed=seed).sequences]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert len({tuple(tokens) for tokens in first}) == 3


def test_without_a_seed_samples_differ(sampling: LocalSamplingClient) -> None:
    first, second = (sample(sampling, count=2, seed=None).sequences for _ in range(2))
    assert [s.tokens for s in first] != [s.tokens for s in second]


def test_sequences_have_ids_of_their_own(sampling: LocalSamplingClient) -> None:
    ids = {found.sequence_id for found in sample(sampling, count=4).sequences}
    assert len(ids) == 4


def test_samples_that_end_early_do_not_change_the_others(sampling: LocalSamplingClient) -> None:
    free = sample(sampling, count=6, max_tokens=12, stop=[]).sequences
    # A token that some sample has early, and another has not.
    stop = free[0].tokens[3]
    ended = sample(sampling, count=6, max_tokens=12, stop=[stop]).sequences
    for whole, part in zip(free, ended, strict=True):
        ends = [i for i, token in enumerate(whole.tokens) if token in (stop, 256)]
        length = ends[0] + 1 if ends else 12
        assert part.tokens == whole.tokens[:length]
        assert part.stop_reason == ("stop" if ends else "length")
        np.testing.assert_allclose(part.logprobs or [], (whole.logprobs or [])[:length], atol=1e-5)
    assert {found.stop_reason for found in ended} == {"stop", "length"}


def test_the_end_token_ends_a_sample_and_an_empty_list_does_not(
    service: LocalServiceClient,
) -> None:
    ender = service.create_lora_training_client("tiny-random", rank=4, seed=0)
    for _ in range(12):
        ender.forward_backward([datum(PROMPT, [256] * 4)], "cross_entropy")
        ender.optim_step(types.AdamParams(learning_rate=0.05))
    ending = ender.save_weights_and_get_sampling_client()
    for stop in (None, [7], "zz"):
        (found,) = sample(ending, temperature=0.0, stop=stop).sequences
        assert (found.tokens, found.stop_reason) == ([256], "stop")
    (found,) = sample(ending, temperature=0.0, stop=[]).sequences
    assert found.tokens[0] == 256
    assert (len(found.tokens), found.stop_reason) == (6, "length")


@pytest.fixture(scope="module")
def writer(service: LocalServiceClient) -> LocalSamplingClient:
    """It writes "abcdé" over and over."""
    writer = service.create_lora_training_client("tiny-random", rank=8, seed=0)
    tokenizer = writer.get_tokenizer()
    tokens = tokenizer.encode("abcdé" * 3, add_special_tokens=False)
    for _ in range(60):
        writer.forward_backward([datum(tokens[:-1], tokens[1:])], "cross_entropy")
        writer.optim_step(types.AdamParams(learning_rate=0.003))
    return writer.save_weights_and_get_sampling_client()


def write(writer: LocalSamplingClient, stop: Any, max_tokens: int | None = 8) -> tuple[str, str]:
    tokenizer = writer.get_tokenizer()
    start = tokenizer.encode("abcdéa", add_special_tokens=False)
    (found,) = sample(writer, start, temperature=0.0, stop=stop, max_tokens=max_tokens).sequences
    return tokenizer.decode(found.tokens), found.stop_reason


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("d", "bcd"),
        ("cd", "bcd"),
        (["zz", "bc"], "bc"),
        ("é", "bcdé"),
        ("éa", "bcdéa"),
        (["", "b"], "b"),
    ],
)
def test_a_stop_string_ends_a_sample_with_it(
    writer: LocalSamplingClient, stop: Any, text: str
) -> None:
    assert write(writer, stop) == (text, "stop")


def test_a_stop_string_that_does_not_occur_has_no_effect(writer: LocalSamplingClient) -> None:
    assert write(writer, "ac") == ("bcdéabc", "length")


def test_without_a_limit_a_sample_ends_with_the_context(sampling: LocalSamplingClient) -> None:
    long = list(range(500))
    (found,) = sample(sampling, long, max_tokens=None, stop=[]).sequences
    assert (len(found.tokens), found.stop_reason) == (12, "length")
    (found,) = sample(sampling, long, max_tokens=400, stop=[]).sequences
    assert len(found.tokens) == 12
    (found,) = sample(sampling, list(range(511)), max_tokens=3, stop=[]).sequences
    assert len(found.tokens) == 1


def test_the_prompt_has_logprobs_on_request(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    rows = distributions(sampled_training, PROMPT)
    expected = [float(rows[i, token]) for i, token in enumerate(PROMPT[1:])]
    assert sample(sampling).prompt_logprobs is None
    found = sample(sampling, options={"include_prompt_logprobs": True}).prompt_logprobs
    assert found == [None, *(pytest.approx(value, abs=1e-5) for value in expected)]
    last = sample(
        sampling, options={"include_prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    ).prompt_logprobs
    assert last == [None, None, *(pytest.approx(value, abs=1e-5) for value in expected[1:])]
    assert sampling.compute_logprobs(prompt()).result() == pytest.approx(found)
    assert sampling.compute_logprobs(prompt(), 2).result() == pytest.approx(last)
    assert sampling.compute_logprobs(prompt([5])).result() == [None]


def test_requested_logprobs_do_not_change_the_samples(sampling: LocalSamplingClient) -> None:
    plain = sample(sampling, count=2).sequences
    for options in (
        {"include_prompt_logprobs": True},
        {"topk_prompt_logprobs": 2, "topk_sample_logprobs": 2},
    ):
        found = sample(sampling, count=2, options=options).sequences
        assert [s.tokens for s in found] == [s.tokens for s in plain]


def test_the_likeliest_tokens_of_the_prompt(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    found = sample(sampling, options={"topk_prompt_logprobs": 3}).topk_prompt_logprobs
    values, ids = distributions(sampled_training, PROMPT)[:-1].topk(3)
    assert found is not None
    assert found[0] is None
    assert len(found) == len(PROMPT)
    for row, value, tokens in zip(found[1:], values, ids, strict=True):
        assert row is not None
        assert [token for token, _ in row] == tokens.tolist()
        assert [lp for _, lp in row] == pytest.approx(value.tolist(), abs=1e-5)


def test_the_likeliest_tokens_of_the_prompt_come_with_its_own_logprobs(sampler: Any) -> None:
    found = sample(sampler, options={"topk_prompt_logprobs": 2})
    expected = sample(sampler, options={"include_prompt_logprobs": True}).prompt_logprobs
    assert found.topk_prompt_logprobs is not None
    assert found.prompt_logprobs == pytest.approx(expected)


def test_logprobs_of_the_prompt_do_not_depend_on_the_temperature(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    options = {"include_prompt_logprobs": True, "prompt_alt_tokens_k": 5}
    found = sample(sampling, options=options, temperature=0.3)
    assert found.prompt_logprobs == sample(sampling, options=options).prompt_logprobs
    assert found.prompt_alt_tokens is not None
    rows = distributions(sampled_training, PROMPT)[:-1]
    tokens = found.prompt_alt_tokens.tokens.to_torch()
    torch.testing.assert_close(
        found.prompt_alt_tokens.logprobs.to_torch().double(),
        rows.gather(-1, tokens),
        rtol=0,
        atol=1e-5,
    )


def test_prompt_logprobs_last_n_limits_the_likeliest_tokens_too(
    sampling: LocalSamplingClient,
) -> None:
    # As the SDK documents prompt_logprobs_last_n.
    options = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "prompt_logprobs_last_n": 1,
    }
    found = sample(sampling, options=options).topk_prompt_logprobs
    whole = sample(sampling, options={"topk_prompt_logprobs": 2}).topk_prompt_logprobs
    assert found is not None
    assert whole is not None
    assert found == [None, None, None, whole[3]]
    del options["include_prompt_logprobs"]
    alone = sample(sampling, options=options)
    assert alone.topk_prompt_logprobs == found
    assert [value is None for value in alone.prompt_logprobs or ()] == [True, True, True, False]


def test_the_likeliest_tokens_of_each_sample(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    assert sample(sampling).sequences[0].topk_logprobs is None
    for found in sample(sampling, count=2, options={"topk_sample_logprobs": 3}).sequences:
        rows = distributions(sampled_training, PROMPT + found.tokens)[len(PROMPT) - 1 : -1]
        assert found.topk_logprobs is not None
        assert len(found.topk_logprobs) == len(found.tokens)
        for top, row in zip(found.topk_logprobs, rows, strict=True):
            values, ids = row.topk(3)
            assert top is not None
            assert [token for token, _ in top] == ids.tolist()
            assert [lp for _, lp in top] == pytest.approx(values.tolist(), abs=1e-5)


def test_the_logprobs_of_chosen_tokens(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    asked = torch.tensor([[5, 6], [-1, 7], [0, -1]])
    rows = distributions(sampled_training, PROMPT)
    expected = torch.tensor(
        [[float(rows[0, 5]), float(rows[0, 6])], [0.0, float(rows[1, 7])], [float(rows[2, 0]), 0.0]]
    )
    for data in (
        types.TensorData.from_torch(asked),
        types.TensorData(
            data=[5, 6, 7, 0],
            dtype="int64",
            shape=[3, 2],
            sparse_crow_indices=[0, 2, 3, 4],
            sparse_col_indices=[0, 1, 1, 0],
        ),
    ):
        found = sample(sampling, options={"target_prompt_logprobs": data}).target_prompt_logprobs
        assert found is not None
        assert found.dtype == "float32"
        torch.testing.assert_close(found.to_torch(), expected, rtol=0, atol=1e-5)


def test_alternatives_for_each_token_of_the_prompt(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    rows = distributions(sampled_training, PROMPT)
    found = sample(sampling, options={"prompt_alt_tokens_k": 40}).prompt_alt_tokens
    assert found is not None
    tokens = found.tokens.to_torch()
    assert tokens.shape == (3, 40)
    torch.testing.assert_close(
        found.logprobs.to_torch().double(), rows[:-1].gather(-1, tokens), rtol=0, atol=1e-5
    )
    assert len(set(tokens.flatten().tolist())) > 10
    again = sample(sampling, options={"prompt_alt_tokens_k": 40}).prompt_alt_tokens
    assert again is not None
    assert torch.equal(again.tokens.to_torch(), tokens)
    # So cold that only the likeliest is left.
    cold = sample(sampling, options={"prompt_alt_tokens_k": 4}, temperature=1e-4).prompt_alt_tokens
    assert cold is not None
    assert torch.equal(cold.tokens.to_torch(), rows[:-1].argmax(-1, keepdim=True).expand(-1, 4))


def test_alternatives_at_temperature_0_are_the_likeliest(
    sampling: LocalSamplingClient, sampled_training: LocalTrainingClient
) -> None:
    # Temperature 0 takes the likeliest, in the prompt as in the samples.
    rows = distributions(sampled_training, PROMPT)
    found = sample(sampling, options={"prompt_alt_tokens_k": 4}, temperature=0.0).prompt_alt_tokens
    assert found is not None
    assert torch.equal(found.tokens.to_torch(), rows[:-1].argmax(-1, keepdim=True).expand(-1, 4))
