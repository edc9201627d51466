"""Load on a server: clients of the real SDK, each in a thread, with requests of every kind."""

from __future__ import annotations

import random
import threading
from typing import Any

import tinker
from tinker import types

from steelyard.engine.server.app import RunningServer
from tests.engine.data import SMALL, ragged

KINDS = ["forward", "batch", "batch", "step", "step", "sample", "custom", "save", "info"]


def work(base_url: str, clients: int, requests: int) -> dict[int, int]:
    """Run clients with mixed requests; return the number of optimizer steps of each."""
    steps: dict[int, int] = {}
    failures: list[BaseException] = []
    # The SDK traces a loss with `torch.fx`, which replaces `Module.__call__` of this whole process
    # meanwhile, also for the model of a server that runs in it.
    traced = threading.Barrier(clients)

    def one(number: int) -> None:
        try:
            steps[number] = _client(base_url, number, requests, traced)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)
            traced.abort()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure
    return steps


def _client(base_url: str, number: int, requests: int, traced: threading.Barrier) -> int:
    rng, steps = random.Random(number), 0
    with tinker.ServiceClient(base_url=base_url, api_key=f"tml-{number}") as service:
        loss = service.create_custom_loss(_loss, {"logprobs": 1, "weights": 1}).result()
        traced.wait()
        training = service.create_lora_training_client("tiny-random", rank=2, seed=number)
        sampling = training.save_weights_and_get_sampling_client()
        data = ragged(number, [5, 3])
        futures: list[Any] = []
        for index in range(requests):
            kind = rng.choice(KINDS)
            if kind == "forward":
                futures.append(training.forward(data, "cross_entropy"))
            elif kind == "batch":
                futures.append(training.forward_backward(data, "cross_entropy"))
            elif kind == "custom":
                futures.append(training.forward_backward_custom(data, loss))
            elif kind == "step":
                futures.append(training.optim_step(SMALL))
                steps += 1
            elif kind == "save":
                futures.append(training.save_state(f"s{index}"))
            elif kind == "sample":
                prompt = types.ModelInput.from_ints([number, 1])
                params = types.SamplingParams(max_tokens=2)
                futures.append(sampling.sample(prompt, 1, params))
            else:
                assert training.get_info().lora_rank == 2
            if rng.random() < 0.3:  # sometimes wait, sometimes go on
                futures[-1:] and futures.pop().result()
        for future in futures:
            future.result()
        assert training.save_state("end").result().path
        return steps


def _loss(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {"custom/mean:mean": logprobs.mean()}


def steps_of(running: RunningServer, model_id: str) -> int:
    """Number of steps in the saved optimizer state of a model."""
    path = f"tinker://{model_id}/weights/end"
    moments = running._state.service.checkpoints.read(path).optimizer_state or {}
    counts = {int(value) for key, value in moments.items() if key.startswith("step/")}
    assert len(counts) <= 1
    return counts.pop() if counts else 0
