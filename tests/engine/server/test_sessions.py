from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from steelyard.engine.server.app import RunningServer
from steelyard.engine.server.sessions import Sessions
from tests.engine.data import ragged

from .uploaded_loss.graphs import SUM, upload
from .wire_client import Wire, start, until

LOSS = upload(SUM).model_dump(mode="json")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Server that looks for silent sessions four times a second."""
    folder = tmp_path_factory.mktemp("sessions")
    with start(folder, client_timeout=60.0, keep_seconds=1.0) as running:
        yield running


def silence(running: RunningServer, session_id: str) -> None:
    """Let a client's last request have been longer ago than the timeout."""
    for session in running._state.sessions:
        if session.session_id == session_id:
            session.last_seen -= 100


def count_adapters(running: RunningServer, base: str = "tiny-random") -> int:
    """Number of adapters in memory, after the engine has run what was queued."""
    host = running._state.service._worker(base)
    host.submit(lambda: None).result()
    return len(host.model._adapters)


def test_a_silent_client_loses_its_session_and_models(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Wire(server.base_url) as silent,
        Wire(server.base_url) as steady,
        steady.beating(),
    ):
        kept = steady.model()
        with silent.beating():
            lost = silent.model()
        silence(server, silent.session_id)
        until(lambda: lost not in server._state.runs)
        assert kept in server._state.runs
        assert silent.step(lost, 1).status_code == 404
        ended = silent.post("session_heartbeat", {"session_id": silent.session_id})
        assert ended.status_code == 410, "the SDK stops its heartbeat then"
        assert "has ended" in ended.json()["detail"]
        until(lambda: count_adapters(server) == 1)  # the adapter of the other was freed
        assert steady.step(kept, 1).status_code == 200
    assert (
        f"session {silent.session_id} was lost: its client has sent nothing for 60 seconds. "
        f"Unloading 1 of its models and 0 of its samplers."
    ) in caplog.messages


def test_a_client_that_waits_for_a_result_is_alive(server: RunningServer) -> None:
    sessions = server._state.sessions
    with Wire(server.base_url) as wire:
        with wire.beating():
            model = wire.model()
            gate = threading.Event()
            server._state.runs[model].client._worker.submit(gate.wait)
            future = wire.step(model, 1).json()
            results: list[Any] = []
            waiting = threading.Thread(target=lambda: results.append(wire.result(future)))
            waiting.start()
            until(lambda: sessions.get(wire.session_id).polling > 0)
        # Until a client that connected later and is silent has lost its session.
        with Wire(server.base_url) as other:
            silence(server, wire.session_id)
            silence(server, other.session_id)
            until(lambda: other.session_id not in {s.session_id for s in sessions})
        gate.set()
        waiting.join()
        assert "metrics" in results[0]


CLIENT = """
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


def test_a_killed_client_does_not_disturb_others(server: RunningServer) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.base_url],
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
                t.request_id.startswith(killed) and t.engine_future for t in server._state.futures
            )
        )
    finally:
        process.kill()
        process.wait()

    def killed_is_lost() -> bool:
        # Again and again: a client is seen when the server closes its connections.
        silence(server, killed.split(":")[0])
        return killed not in server._state.runs

    with Wire(server.base_url) as steady, steady.beating():
        model = steady.model()
        output = steady.result(steady.batch(model, 1, ragged(0, [4])).json())
        assert output.metrics
        until(killed_is_lost)
        assert not [t for t in server._state.futures if t.request_id.startswith(killed)]
        assert steady.step(model, 2).status_code == 200


def test_a_session_is_lost_after_the_timeout(tmp_path: Path) -> None:
    with start(tmp_path, client_timeout=0.5) as running, Wire(running.base_url) as silent:
        until(lambda: not list(running._state.sessions))
        ended = silent.post("session_heartbeat", {"session_id": silent.session_id})
        assert ended.status_code == 410


def test_ids_of_an_earlier_server_are_known(tmp_path: Path) -> None:
    with start(tmp_path) as earlier, Wire(earlier.base_url) as old:
        model = old.model()
        request_id = old.step(model, 1).json()["request_id"]
        session = {"session_id": old.session_id}
        made = {**session, "sampling_session_seq_id": 0, "base_model": "tiny-random"}
        sampler = old.ok("create_sampling_session", made)["sampling_session_id"]
    with start(tmp_path) as later, Wire(later.base_url) as new:
        for response in (
            new.post("session_heartbeat", session),
            new.step(model, 2),
            new.post("retrieve_future", {"request_id": request_id}),
            new.post("retrieve_futures", {"target": {"sampling_session_id": sampler}}),
            new.post("create_custom_loss", {**LOSS, **session}),
        ):
            assert response.status_code == 410
            assert "the server was restarted" in response.json()["detail"]
        unknown = new.post("retrieve_future", {"request_id": f"{new.session_id}:train:0:1"})
        assert unknown.status_code == 404
        assert "kept for a while only" in unknown.json()["detail"]


def test_a_session_is_open_until_it_ends() -> None:
    sessions = Sessions(2)
    session = sessions.create({"who": "me"}, "A test")
    assert sessions.get(session.session_id) is session
    assert list(sessions) == [session]
    sessions.end(session.session_id)
    assert list(sessions) == []
    with pytest.raises(HTTPException, match="has ended: make a new client") as ended:
        sessions.get(session.session_id)
    with pytest.raises(HTTPException, match="got 'nobody'") as unknown:
        sessions.get("nobody")
    assert (ended.value.status_code, unknown.value.status_code) == (410, 404)


def test_the_number_of_open_sessions_is_limited() -> None:
    sessions = Sessions(2)
    first, _ = sessions.create(None, None), sessions.create(None, None)
    with pytest.raises(HTTPException, match="at most 2 clients may be connected") as error:
        sessions.create(None, None)
    assert error.value.status_code == 403
    sessions.end(first.session_id)
    assert sessions.create(None, None).user_metadata == {}


def test_requests_and_held_connections_keep_a_session_alive() -> None:
    sessions = Sessions(9)
    touched, fetched, polling, silent = (sessions.create(None, None) for _ in range(4))
    for session in sessions:
        session.last_seen -= 100
    sessions.touch(touched.session_id)
    sessions.touch("nobody")
    sessions.get(fetched.session_id)
    with sessions.polling(polling.session_id), sessions.polling("nobody"):
        assert sessions.silent(50) == [silent.session_id]
        polling.last_seen -= 100
        assert sessions.silent(50) == [silent.session_id]
    assert polling.polling == 0
    assert sessions.silent(50) == [silent.session_id], "seen when the connection ended"
    assert sessions.silent(1000) == []


def test_only_the_latest_ended_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.engine.server.sessions._MAX_ENDED", 1)
    sessions = Sessions(9)
    ended = [sessions.create(None, None).session_id for _ in range(2)]
    for session_id in ended:
        sessions.end(session_id)
    for session_id, status in zip(ended, (404, 410), strict=True):
        with pytest.raises(HTTPException) as error:
            sessions.get(session_id)
        assert error.value.status_code == status
