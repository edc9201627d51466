"""Clients come, are heard of, and go; with them goes what they had."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from steelyard.engine.server.lifecycle import RunningServer
from tests.engine.data import SMALL, ragged

from .wire_client import Wire, start, until


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that soon misses those it does not hear of."""
    with start(tmp_path_factory.mktemp("forgetful"), client_timeout=5.0) as running:
        yield running


def adapters(running: RunningServer, base: str = "tiny-random") -> int:
    """The adapters in memory, when those that are to go have gone."""
    host = running._state.service._host(base)
    host.later(lambda: None).result()
    return len(host.model._adapters)


def test_a_client_that_is_not_heard_of_any_more_is_sent_away(forgetful: RunningServer) -> None:
    with (
        Wire(forgetful.base_url) as silent,
        Wire(forgetful.base_url) as steady,
        steady.beating(),
    ):
        kept, lost = steady.model(), silent.model()
        until(lambda: lost not in forgetful._state.runs)
        assert kept in forgetful._state.runs
        assert silent.step(lost, 1).status_code == 404
        ended = silent.post("session_heartbeat", {"session_id": silent.session_id})
        assert ended.status_code == 410, "the SDK stops its heartbeat then"
        assert "has ended" in ended.json()["detail"]
        until(lambda: adapters(forgetful) == 1)  # its memory was given back
        assert steady.step(kept, 1).status_code == 200


def test_whoever_waits_for_an_answer_is_there(forgetful: RunningServer) -> None:
    with Wire(forgetful.base_url) as wire, Wire(forgetful.base_url) as other:
        model = wire.model()
        gate = threading.Event()
        forgetful._state.runs[model].client._host.later(gate.wait)
        promised = wire.step(model, 1).json()
        answers: list[Any] = []
        waiting = threading.Thread(target=lambda: answers.append(wire.answer(promised)))
        waiting.start()
        # Until a client that came later, and says nothing, has been sent away.
        until(lambda: other.session_id not in {s.session_id for s in forgetful._state.sessions})
        gate.set()
        waiting.join()
        assert "metrics" in answers[0]


KILLED = """
import sys, tinker
from tinker import types
datum = types.Datum(
    model_input=types.ModelInput.from_ints(list(range(400))),
    loss_fn_inputs={"target_tokens": list(range(400))},
)
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-local")
training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
print(training.model_id, flush=True)
for future in [training.forward_backward([datum] * 4, "cross_entropy") for _ in range(50)]:
    future.result()
"""


def test_a_client_that_is_killed_leaves_the_others_in_peace(forgetful: RunningServer) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, forgetful.base_url],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        with process.stdout as out:
            killed = out.readline().strip()
        until(
            lambda: any(
                t.request_id.startswith(killed) and t.engine_future
                for t in forgetful._state.futures
            )
        )
    finally:
        process.kill()
        process.wait()
    with Wire(forgetful.base_url) as steady, steady.beating():
        model = steady.model()
        output = steady.answer(steady.batch(model, 1, ragged(0, [4])).json())
        assert output.metrics
        until(lambda: killed not in forgetful._state.runs)
        assert not [t for t in forgetful._state.futures if t.request_id.startswith(killed)]
        assert steady.step(model, 2).status_code == 200


def test_a_client_that_closes_takes_its_models_along(running: RunningServer) -> None:
    with tinker.ServiceClient(base_url=running.base_url, api_key="tml-local") as service:
        training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        sampling = training.save_weights_and_get_sampling_client()
        assert training.model_id in running._state.runs
    assert training.model_id not in running._state.runs
    assert sampling._sampling_session_id not in running._state.samplers


def test_a_model_can_be_unloaded(wire: Wire, running: RunningServer) -> None:
    model = wire.model()
    gate = threading.Event()
    running._state.runs[model].client._host.later(gate.wait)
    waiting = [wire.step(model, 1).json(), wire.step(model, 3).json()]
    unloaded = wire.answer(wire.ok("unload_model", {"model_id": model}))
    assert unloaded == {"model_id": model, "type": None}
    gate.set()
    for promised in waiting:
        assert wire.answer(promised)["error"] == "the model was unloaded."
    assert wire.step(model, 2).status_code == 404


def test_heartbeats_are_answered_while_a_model_works(wire: Wire, running: RunningServer) -> None:
    model = wire.model()
    gate = threading.Event()
    running._state.runs[model].client._host.later(gate.wait)
    promised = wire.step(model, 1).json()
    for _ in range(20):
        wire.ok("session_heartbeat", {"session_id": wire.session_id})
    future = running._state.futures.get(promised["request_id"])
    assert future is not None
    assert future.result is None
    gate.set()
    wire.answer(promised)


def test_samples_that_nobody_wants_are_not_drawn(
    running: RunningServer, sdk: tinker.ServiceClient
) -> None:
    sampling = sdk.create_sampling_client(base_model="tiny-random")
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=2)
    gate = threading.Event()
    held = running._state.service._host("tiny-random").later(gate.wait)

    name = f"{sampling._sampling_session_id}:0"

    def future() -> Any:
        return running._state.futures.get(name)

    async def give_up() -> None:
        asked = asyncio.ensure_future(sampling.sample_async(prompt, 1, params))
        await asyncio.to_thread(
            until, lambda: future() is not None and future().engine_future is not None
        )
        log = running._state.samplers.get(sampling._sampling_session_id).completions_of(0)
        await asyncio.to_thread(until, lambda: bool(log._added._waiters))  # the SDK waits for it
        work = future().engine_future
        asked.cancel()
        await asyncio.to_thread(until, lambda: future().result is not None)
        assert work.cancelled()

    asyncio.run(give_up())
    gate.set()
    held.result()
    assert sampling.sample(prompt, 1, params).result().sequences[0].tokens


def test_a_server_that_stops_finishes_its_step_and_gives_up_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # the SDK would send it to a dead server for ever
    with start(tmp_path) as running:
        service = tinker.ServiceClient(base_url=running.base_url, api_key="tml-local")
        training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        client = running._state.runs[training.model_id].client
        begun, gate = threading.Event(), threading.Event()
        step = client._trainer.adapter.step

        def slow(params: types.AdamParams) -> float:
            begun.set()
            gate.wait()
            return step(params)

        client._trainer.adapter.step = slow  # type: ignore[method-assign]
        first = training.optim_step(SMALL)
        begun.wait()
        second = training.optim_step(SMALL)
        saved = training.save_state("half")
        until(lambda: sum(t.engine_future is not None for t in running._state.futures) == 3)
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        until(lambda: running._state.stopping)
        gate.set()
        assert first.result().metrics == {"unclipped_grad_l2:mean": 0.0}, "it was finished"
        for given_up in (second, saved):
            with pytest.raises(tinker.RequestFailedError, match="the server is stopping"):
                given_up.result()
        stopping.join()
        running.stop = lambda: None  # type: ignore[method-assign]
        service.holder.close()
    assert not list(tmp_path.rglob("half")), "nothing was saved, nor half of it"


def test_a_server_that_has_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with start(tmp_path) as running:
        port = int(running.base_url.rpartition(":")[2])
        assert "steelyard-serve" in {thread.name for thread in threading.enumerate()}
    left = {t.name for t in threading.enumerate() if t.name.startswith("steelyard")}
    assert left <= before
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz")
    with start(tmp_path) as again:
        assert httpx.get(f"{again.base_url}/api/v1/healthz").status_code == 200
