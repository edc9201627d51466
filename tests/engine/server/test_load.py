"""Many concurrent clients, and connections that break."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from steelyard.engine import LocalServiceClient
from steelyard.engine.server.app import RunningServer
from tests.engine.data import SMALL, ragged

from .load import steps_of, work
from .proxy import proxy
from .wire_client import start, until


def test_no_step_of_concurrent_clients_is_lost_or_doubled(tmp_path: Path) -> None:
    """Eight clients with twelve requests each; `make stress` has 32 with fifty."""
    hours = dict.fromkeys(("client_timeout", "gap_seconds", "keep_seconds"), 3600.0)
    with start(tmp_path, **hours) as running:
        steps = work(running.base_url, clients=8, requests=12)
        models = sorted(tmp_path.iterdir())
        assert len(models) == len(steps) == 8
        assert sorted(steps_of(running, model.name) for model in models) == sorted(steps.values())
        # All clients have closed, so no future and no model is left.
        until(lambda: len(running._state.futures) == 0 and running._state.runs == {})


def test_lost_responses_change_no_result(running: RunningServer, local: LocalServiceClient) -> None:
    losses = {"forward_backward": 1, "optim_step": 1, "retrieve_future": 1, "create_model": 1}
    with proxy(running.base_url, losses) as (url, between):
        service = tinker.ServiceClient(base_url=url, api_key="tml-local")
        theirs = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        mine = local.create_lora_training_client("tiny-random", rank=4, seed=0)
        for step in range(2):
            future: Any = theirs.forward_backward(ragged(step, [4, 2]), "cross_entropy")
            stepped = theirs.optim_step(SMALL)
            expected = mine.forward_backward(ragged(step, [4, 2]), "cross_entropy").result()
            other = mine.optim_step(SMALL).result()
            assert future.result().metrics == pytest.approx(expected.metrics, abs=1e-5)
            assert stepped.result().metrics == pytest.approx(other.metrics, rel=1e-5)
        assert set(between.losses.values()) == {0}, "each was lost once"
        service.close("success").result()


def test_concurrent_samples_of_one_client_are_not_mixed_up(sdk: tinker.ServiceClient) -> None:
    sampling = sdk.create_sampling_client(base_model="tiny-random")
    params = types.SamplingParams(max_tokens=3, temperature=0.0)
    found: dict[int, list[int]] = {}

    def ask(first: int) -> None:
        prompt = types.ModelInput.from_ints([first, 2, 3])
        found[first] = sampling.sample(prompt, 1, params).result().sequences[0].tokens

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for first, tokens in found.items():
        prompt = types.ModelInput.from_ints([first, 2, 3])
        assert sampling.sample(prompt, 1, params).result().sequences[0].tokens == tokens
