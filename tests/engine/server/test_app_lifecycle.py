from __future__ import annotations

import socket
import threading
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from steelyard.engine import serve
from steelyard.engine.server.app import RunningServer
from steelyard.errors import InputError, ModelError
from tests.engine.data import SMALL

from .wire_client import start, until


def test_an_unknown_model_leaves_the_port_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        with pytest.raises(ModelError, match="got 'no-such'"), serve("no-such", port=port):
            pytest.fail("it serves")


def test_stopping_finishes_the_running_step_and_fails_the_rest(
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


def test_a_request_that_comes_while_the_server_stops_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests before it have been cancelled; the engine is closed later."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # the SDK would send it to a dead server for ever
    with start(tmp_path) as running:
        service = tinker.ServiceClient(base_url=running.base_url, api_key="tml-local")
        training = service.create_lora_training_client("tiny-random", rank=4, seed=0)
        assert training.optim_step(SMALL).result().metrics
        losses, gate = running._state.loss_processes, threading.Event()
        close = losses.close
        monkeypatch.setattr(losses, "close", lambda: (gate.wait(), close()))
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        until(lambda: running._state.stopping)
        try:
            late = training.optim_step(SMALL)
            with pytest.raises(tinker.RequestFailedError, match="the server is stopping"):
                late.result()
        finally:
            gate.set()
            stopping.join()
        running.stop = lambda: None  # type: ignore[method-assign]
        service.holder.close()


def test_a_stopped_server_leaves_no_thread_and_no_open_port(tmp_path: Path) -> None:
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


def test_a_port_that_is_taken_is_rejected(tmp_path: Path) -> None:
    with start(tmp_path) as running:
        port = int(running.base_url.rpartition(":")[2])
        with pytest.raises(InputError, match=f"127.0.0.1:{port} is not: .*Choose another port"):
            RunningServer(["tiny-random"], "127.0.0.1", port, {}, {})


def test_the_base_url_and_the_models_are_those_of_the_arguments(tmp_path: Path) -> None:
    running = RunningServer(["tiny-random"], "::1", 0, {"checkpoint_dir": tmp_path}, {})
    try:
        assert running.base_url.startswith("http://[::1]:")
        assert [model.name for model in running.models.offered] == ["tiny-random"]
        assert httpx.get(f"{running.base_url}/api/v1/healthz").json() == {"status": "ok"}
    finally:
        running.stop()
