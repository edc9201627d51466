"""Clients of the real SDK, each in a thread, with requests of every kind."""

from __future__ import annotations

import random
import threading
from typing import Any

import tinker
from tinker import types

from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import SMALL, ragged

VERBS = ["forward", "batch", "batch", "step", "step", "sample", "custom", "save", "info"]


def work(base_url: str, clients: int, requests: int) -> dict[int, int]:
    """The steps that each client has made, after as many mixed requests."""
    made: dict[int, int] = {}
    failures: list[BaseException] = []

    def one(number: int) -> None:
        try:
            made[number] = _client(base_url, number, requests)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return made


def _client(base_url: str, number: int, requests: int) -> int:
    dice, steps = random.Random(number), 0
    with tinker.ServiceClient(base_url=base_url, api_key=f"tml-{number}") as service:
        training = service.create_lora_training_client("tiny-random", rank=2, seed=number)
        sampling = training.save_weights_and_get_sampling_client()
        loss = service.create_custom_loss(_loss, {"logprobs": 1, "weights": 1}).result()
        data = ragged(number, [5, 3])
        asked: list[Any] = []
        for index in range(requests):
            verb = dice.choice(VERBS)
            if verb == "forward":
                asked.append(training.forward(data, "cross_entropy"))
            elif verb == "batch":
                asked.append(training.forward_backward(data, "cross_entropy"))
            elif verb == "custom":
                asked.append(training.forward_backward_custom(data, loss))
            elif verb == "step":
                asked.append(training.optim_step(SMALL))
                steps += 1
            elif verb == "save":
                asked.append(training.save_state(f"s{index}"))
            elif verb == "sample":
                prompt = types.ModelInput.from_ints([number, 1])
                params = types.SamplingParams(max_tokens=2)
                asked.append(sampling.sample(prompt, 1, params))
            else:
                assert training.get_info().lora_rank == 2
            if dice.random() < 0.3:  # sometimes wait, sometimes go on
                asked[-1:] and asked.pop().result()
        for future in asked:
            future.result()
        optimizer = training.save_state("end").result().path
        assert optimizer
        return steps


def _loss(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {"custom/mean:mean": logprobs.mean()}


def steps_of(running: RunningServer, model_id: str) -> int:
    """The steps a model's optimizer has counted."""
    path = f"tinker://{model_id}/weights/end"
    moments = running._state.service.checkpoints.read(path).moments or {}
    counts = {int(value) for key, value in moments.items() if key.startswith("step/")}
    assert len(counts) <= 1
    return counts.pop() if counts else 0
