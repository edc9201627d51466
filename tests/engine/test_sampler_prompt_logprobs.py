from __future__ import annotations

import pytest
import torch
from tinker import types

from steelyard.engine import LocalSamplingClient, LocalTrainingClient

from .data import PROMPT, distributions, prompt, sample


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
