from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from steelyard.engine.server.app import RunningServer

from .comparison import PROMPT
from .wire_client import Wire, error_of, start, until


def create_sampler(wire: Wire) -> str:
    body = {"session_id": wire.session_id, "sampling_session_seq_id": 0}
    made = wire.ok("create_sampling_session", {**body, "base_model": "tiny-random"})
    sampler_id: str = made["sampling_session_id"]
    return sampler_id


def test_an_invalid_sampling_request_is_rejected(wire: Wire) -> None:
    sampler_id = create_sampler(wire)
    good: dict[str, Any] = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"prompt": {"chunks": []}}, 400, "1 to 512 tokens"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [512]}]}}, 400, "511"),
        ({"num_samples": 0}, 400, "num_samples"),
        ({"sampling_params": {"max_tokens": 2, "temperature": -1}}, 400, "temperature"),
        ({"num_samples": 10**9}, 413, "from 1 to 4096, got 1000000000: send several"),
        # Without tokens to bound their number: the ids of as many sequences would be sent.
        ({"num_samples": 2**17, "sampling_params": {"max_tokens": 1}}, 413, "from 1 to 4096"),
        ({"num_samples": 4096, "sampling_params": {"max_tokens": 512}}, 413, "1048576 tokens"),
        ({"num_samples": 2048, "sampling_params": {"max_tokens": 2**40}}, 413, "got 1048578"),
        ({"num_samples": 2048, "sampling_params": {}}, 413, "got 1048578"),
        ({"topk_sample_logprobs": 513}, 400, "topk_sample_logprobs"),
        (
            {"num_samples": 2000, "topk_sample_logprobs": 512, "sampling_params": {}},
            413,
            "at most 67108864 log-probs of other tokens, got 524288000: lower topk_sample",
        ),
        ({"topk_prompt_logprobs": 2**40}, 413, "log-probs of other tokens"),
        ({"prompt_alt_tokens_k": 2**40}, 413, "log-probs of other tokens"),
        ({"sampling_session_id": None}, 400, "must be given"),
        ({"sampling_session_id": "nobody"}, 404, "nobody"),
        ({"seq_id": 10**9}, 404, "join the sampling session first"),
        ({"seq_id": -1}, 404, "join the sampling session first"),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [10**9, 99]}},
            413,
            "cells",
        ),
        (
            {
                "target_prompt_logprobs": {
                    "data": [1],
                    "dtype": "int64",
                    "shape": [-5, -5],
                    "sparse_crow_indices": [0],
                    "sparse_col_indices": [9],
                }
            },
            400,
            "whole tensor",
        ),
        (
            {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64", "shape": [3]}},
            400,
            "whole tensor",
        ),
    ]
    for number, (changed, status, why) in enumerate(cases):
        response = wire.post("asample", {**good, "seq_id": number, **changed})
        assert response.status_code == status, (changed, response.text)
        assert why in error_of(response)
        again = wire.post("asample", {**good, "seq_id": number, **changed})
        assert again.status_code == status, "so too when it is sent again"
    assert wire.post("asample", {**good, "seq_id": 99}).status_code == 200


def test_clones_of_a_sampling_client_work(
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


def test_each_clone_that_joins_gets_the_next_id(wire: Wire) -> None:
    sampler_id = create_sampler(wire)
    joined = [
        wire.ok("join_sampling_session", {"sampling_session_id": sampler_id})["client_counter"]
        for _ in range(2)
    ]
    assert joined == [1, 2]


def test_a_sampler_is_created_once_and_names_its_tokenizer(
    wire: Wire, running: RunningServer
) -> None:
    sampler_id = create_sampler(wire)
    first = running._state.samplers.get(sampler_id)
    assert create_sampler(wire) == sampler_id
    assert running._state.samplers.get(sampler_id) is first
    described = wire.http.get(f"samplers/{sampler_id}").json()
    (model,) = running.models.offered
    assert (described["sampler_id"], described["base_model"]) == (sampler_id, model.tokenizer)
    assert described["model_path"] is None


def test_a_sampler_of_a_session_that_has_ended_meanwhile_is_not_kept(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Wire(running.base_url) as wire, Wire(running.base_url) as other:
        begin = running._state.service.begin_sampling

        def slow(*args: Any, **kwargs: Any) -> Any:
            reason = {"reason": {"type": "success"}}
            other.post(f"sessions/{wire.session_id}/finish", reason)
            return begin(*args, **kwargs)

        monkeypatch.setattr(running._state.service, "begin_sampling", slow)
        body = {"session_id": wire.session_id, "sampling_session_seq_id": 0}
        response = wire.post("create_sampling_session", {**body, "base_model": "tiny-random"})
        assert (response.status_code, "has ended" in error_of(response)) == (410, True)
        assert running._state.samplers.of_session(wire.session_id) == []


def test_a_sample_of_a_sampler_that_is_never_made_fails_when_the_server_stops(
    tmp_path: Path,
) -> None:
    with start(tmp_path) as running, ThreadPoolExecutor(2) as pool:
        wire = Wire(running.base_url)
        model = wire.model()
        saved = {"model_id": model, "seq_id": 1, "path": "w"}
        path = wire.result(wire.ok("save_weights_for_sampler", saved))["path"]
        (worker,) = running._state.service._workers.values()
        gate = threading.Event()
        worker.submit(gate.wait)
        body = {"session_id": wire.session_id, "sampling_session_seq_id": 0}
        made = wire.ok("create_sampling_session", {**body, "model_path": path})
        sample = {
            "sampling_session_id": made["sampling_session_id"],
            "seq_id": 0,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 2},
        }
        waiting = pool.submit(wire.post, "asample", sample)
        until(lambda: any(f.request_type == "asample" for f in running._state.futures))
        stopping = pool.submit(running.stop)
        until(lambda: worker._closed)
        gate.set()
        assert waiting.result(600).status_code == 200
        stopping.result(600)
        wire.http.close()
        running.stop = lambda: None  # type: ignore[method-assign]


def test_the_numbers_of_samplers_and_samples_belong_to_one_request(wire: Wire) -> None:
    session = {"session_id": wire.session_id, "sampling_session_seq_id": 0}
    created = {**session, "base_model": "tiny-random"}
    sampler_id = wire.ok("create_sampling_session", created)["sampling_session_id"]
    assert wire.ok("create_sampling_session", created)["sampling_session_id"] == sampler_id
    model = wire.model()
    saved = wire.result(
        wire.ok("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "w"})
    )
    other = wire.post("create_sampling_session", {**session, "model_path": saved["path"]})
    assert other.status_code == 409
    snapshot = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
    assert wire.post("save_weights_for_sampler", snapshot).status_code == 409
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }
    future = wire.ok("asample", body)
    assert wire.ok("asample", body) == future
    assert wire.post("asample", {**body, "num_samples": 2}).status_code == 409
    assert "metrics" in wire.result(wire.step(model, 3).json()), "later requests run"


def test_requests_that_wait_share_a_batch_and_get_what_they_get_alone(
    training: tinker.TrainingClient, running: RunningServer
) -> None:
    sampling = training.save_weights_and_get_sampling_client()
    requests = [
        (
            types.ModelInput.from_ints(list(range(3, 5 + 4 * seed))),
            2,
            types.SamplingParams(max_tokens=9, seed=seed, stop=[]),
        )
        for seed in range(4)
    ]
    alone = [sampling.sample(*request).result() for request in requests]
    (worker,) = running._state.service._workers.values()
    rows: list[int] = []
    hook = worker.model._base.register_forward_pre_hook(
        lambda _, __, inputs: rows.append(len(inputs["input_ids"])), with_kwargs=True
    )
    gate = threading.Event()
    worker.submit(gate.wait)
    futures = [sampling.sample(*request) for request in requests]
    until(lambda: len(worker._queue) == len(requests))
    gate.set()
    together = [future.result() for future in futures]
    hook.remove()
    assert rows.count(8) == 8, "eight samples, eight tokens each after the first"
    for found, expected in zip(together, alone, strict=True):
        for sequence, same in zip(found.sequences, expected.sequences, strict=True):
            assert sequence.tokens == same.tokens
            assert sequence.logprobs == pytest.approx(same.logprobs, abs=1e-4)
