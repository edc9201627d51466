from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
from steelyard.engine import sampler as sampler_module
from steelyard.errors import ModelError

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


def test_requested_logprobs_do_not_change_the_samples(sampling: LocalSamplingClient) -> None:
    plain = sample(sampling, count=2).sequences
    for options in (
        {"include_prompt_logprobs": True},
        {"topk_prompt_logprobs": 2, "topk_sample_logprobs": 2},
    ):
        found = sample(sampling, count=2, options=options).sequences
        assert [s.tokens for s in found] == [s.tokens for s in plain]


def test_the_likeliest_tokens_of_the_prompt_come_with_its_own_logprobs(sampler: Any) -> None:
    found = sample(sampler, options={"topk_prompt_logprobs": 2})
    expected = sample(sampler, options={"include_prompt_logprobs": True}).prompt_logprobs
    assert found.topk_prompt_logprobs is not None
    assert found.prompt_logprobs == pytest.approx(expected)


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


# Requests that share a batch


MIXED: list[tuple[list[int], int, dict[str, Any]]] = [
    (PROMPT, 2, {"seed": 1, "max_tokens": 25}),
    ([7], 1, {"seed": 1, "max_tokens": 40, "temperature": 0.5, "top_p": 0.8}),
    ([3] * 30, 3, {"seed": 2, "max_tokens": 3, "top_k": 9}),
    (PROMPT, 1, {"seed": 2, "max_tokens": 12, "temperature": 0.0}),
    (list(range(40, 60)), 2, {"seed": -5, "max_tokens": 18, "stop": list(range(0, 512, 9))}),
]


def requests_of(mixed: list[tuple[list[int], int, dict[str, Any]]]) -> list[Any]:
    return [
        (prompt(tokens), count, types.SamplingParams(**{"stop": [], **params}))
        for tokens, count, params in mixed
    ]


def together(client: Any, requests: list[Any]) -> list[types.SampleResponse]:
    """Responses to requests that all wait when the first one's turn comes."""
    gate = threading.Event()
    client._worker.submit(gate.wait)
    futures = [client.sample(*request) for request in requests]
    gate.set()
    return [future.result() for future in futures]


def written(responses: list[types.SampleResponse]) -> list[tuple[list[int], Any, str]]:
    return [
        (found.tokens, found.logprobs, found.stop_reason)
        for response in responses
        for found in response.sequences
    ]


@contextmanager
def watched(client: Any) -> Iterator[list[tuple[int, int]]]:
    """Shapes `(rows, tokens)` of the inputs of all passes of the model."""
    shapes: list[tuple[int, int]] = []

    def watch(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        shapes.append(tuple(inputs["input_ids"].shape))

    # Before watching: the passes that find out about the model.
    assert client._worker.model.supports_padding
    assert client._worker.model.cache_bytes > 0
    hook = client._worker.model._base.register_forward_pre_hook(watch, with_kwargs=True)
    yield shapes
    hook.remove()


def test_what_a_request_gets_does_not_depend_on_its_neighbours(
    sampling: LocalSamplingClient,
) -> None:
    requests = requests_of(MIXED)
    alone = [sampling.sample(*request).result() for request in requests]
    expected = written(alone)
    assert written(together(sampling, requests)) == expected
    assert written(together(sampling, requests[::-1])[::-1]) == expected
    assert {reason for _, _, reason in expected} == {"stop", "length"}


def test_neighbours_move_logprobs_in_float32_by_rounding_alone(service: LocalServiceClient) -> None:
    sampling = service.create_sampling_client(base_model="tiny-random")
    requests = requests_of(MIXED)
    alone = written([sampling.sample(*request).result() for request in requests])
    for found, expected in zip(written(together(sampling, requests)), alone, strict=True):
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-4)


def test_waiting_requests_share_the_passes_of_the_model(exact: LocalServiceClient) -> None:
    sampling = exact.create_sampling_client(base_model="tiny-random")
    with watched(sampling) as shapes:
        together(sampling, requests_of(MIXED))
    prefills = [shape for shape in shapes if shape[1] > 1 or shape == (1, 1)]
    # The prompt that two requests share is computed once.
    assert sorted(tokens for _, tokens in prefills[:4]) == [1, 4, 20, 30]
    assert len(shapes) == 4 + 39, "as many steps as the longest sample has tokens after its first"
    assert shapes[4] == (9, 1)


def test_a_request_joins_a_batch_between_two_tokens(exact: LocalServiceClient) -> None:
    sampling = exact.create_sampling_client(base_model="tiny-random")
    short, long, late = (
        (prompt(tokens), 1, types.SamplingParams(max_tokens=number, seed=3, stop=[]))
        for tokens, number in (([1, 2], 3), ([5], 30), ([8] * 9, 6))
    )
    expected = written([sampling.sample(*request).result() for request in (short, long, late)])
    ended: list[str] = []
    gate, submitted = threading.Event(), threading.Event()
    joined: list[Any] = []

    def submit_late(_: Any) -> None:  # on the worker thread, after the third token of all
        joined.append(sampling.sample(*late))
        joined[0].add_done_callback(lambda _: ended.append("late"))
        submitted.set()

    sampling._worker.submit(gate.wait)
    first, second = sampling.sample(*short), sampling.sample(*long)
    first.add_done_callback(submit_late)
    second.add_done_callback(lambda _: ended.append("long"))
    gate.set()
    found = [first.result(), second.result()]
    assert submitted.wait(600)
    found.append(joined[0].result())
    assert ended == ["late", "long"]
    assert written(found) == expected


@pytest.mark.parametrize(("rows", "size"), [(3, 2**32), (64, 1), (64, 40_000)])
def test_samples_wait_for_rows_and_their_prompt_is_computed_once(
    exact: LocalServiceClient, monkeypatch: pytest.MonkeyPatch, rows: int, size: int
) -> None:
    sampling = exact.create_sampling_client(base_model="tiny-random")
    request = (prompt(), 8, types.SamplingParams(max_tokens=7, seed=1, stop=[5, 50]))
    expected = written([sampling.sample(*request).result()])
    sampling._worker.submit(len, []).result()  # the batch has ended: the next request begins one
    monkeypatch.setattr(sampler_module, "_CPU_ROWS", rows)
    monkeypatch.setattr(sampler_module, "_CACHE_BYTES", size)
    with watched(sampling) as shapes:
        assert written([sampling.sample(*request).result()]) == expected
    assert [shape for shape in shapes if shape[1] > 1] == [(1, len(PROMPT))]
    # tiny-random has 1 KiB for each token of its cache, and a row has 4 + 7 tokens.
    assert max(number for number, _ in shapes) == {2**32: 3, 1: 1, 40_000: 3}[size]


def test_a_list_has_the_same_bits_whatever_else_is_queued(service: LocalServiceClient) -> None:
    sampling = service.create_sampling_client(base_model="tiny-random")
    requests = requests_of(MIXED)
    first = sampling.sample_list(requests).result()
    gate = threading.Event()
    sampling._worker.submit(gate.wait)
    others = [sampling.sample(*request) for request in requests]
    again = sampling.sample_list(requests)
    others += [sampling.sample(*request) for request in requests]
    gate.set()
    assert written(again.result()) == written(first)
    assert [len(response.sequences) for response in first] == [2, 1, 3, 1, 2]
    for response, expected in zip(others, first * 2, strict=True):
        assert [s.tokens for s in response.result().sequences] == [
            s.tokens for s in expected.sequences
        ]
    assert sampling.sample_list([]).result() == []


def test_a_request_that_cannot_begin_fails_alone(tmp_path: Path) -> None:
    tiny.build(torch.float32).save_pretrained(tmp_path)  # without a tokenizer
    with LocalServiceClient() as service:
        sampling = service.create_sampling_client(base_model=str(tmp_path))
        gate = threading.Event()
        sampling._worker.submit(gate.wait)
        params = types.SamplingParams(max_tokens=2, stop="a")
        failed = sampling.sample(prompt(), 1, params)
        fine = sampling.sample(prompt(), 1, types.SamplingParams(max_tokens=2, stop=[]))
        gate.set()
        with pytest.raises(ModelError):
            failed.result()
        assert len(fine.result().sequences[0].tokens) == 2


def test_a_failing_pass_fails_its_batch_and_not_the_next(exact: LocalServiceClient) -> None:
    sampling = exact.create_sampling_client(base_model="tiny-random")
    requests = requests_of(MIXED)

    def fail(*_: Any) -> None:
        raise MemoryError("mine")

    hook = sampling._worker.model._base.register_forward_pre_hook(fail)
    gate = threading.Event()
    sampling._worker.submit(gate.wait)
    futures = [sampling.sample(*request) for request in requests]
    gate.set()
    for future in futures:
        with pytest.raises(MemoryError, match="mine"):
            future.result()
    hook.remove()
    assert written([sampling.sample(*requests[0]).result()])
