"""The command `steelyard serve`, run for real and called by the Tinker SDK."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from tests.engine.data import ragged

from .command import CommandRunner, Started


def url_of(started: Started) -> str:
    """Wait until the server listens; its URL."""
    while True:
        output = started.out.read_text() if started.out.exists() else ""
        if found := re.search(r"TINKER_BASE_URL=(\S+)\n.*\n", output):
            return found[1]
        time.sleep(0.01)


@pytest.fixture
def served(command: CommandRunner, tmp_path: Path) -> Iterator[Started]:
    args = ("--port", "0", "--base-model", "tiny-random", "--checkpoints", str(tmp_path / "c"))
    started = command.start("serve", *args, cwd=tmp_path)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.pid, signal.SIGKILL)


def test_serve_prints_the_settings_of_the_sdk_and_stops(served: Started) -> None:
    url = url_of(served)
    assert served.out.read_text() == (
        f"Serving tiny-random at {url}\n"
        "In the shell of the program that uses the Tinker SDK:\n"
        f"  export TINKER_BASE_URL={url}\n"
        "  export TINKER_API_KEY=tml-local\n"
    )
    with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
        training = service.create_lora_training_client("tiny-random", rank=2, seed=0)
        assert training.forward_backward(ragged(0, [4]), "cross_entropy").result().metrics
    served.kill(signal.SIGINT)
    done = served.wait()
    assert done.code == 0, done.err
    assert done.out.endswith("\nStopped.\n")
    assert done.err == "Stopping when this step is done. Ctrl-C again ends at once.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_running_step_is_finished(
    served: Started, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # the SDK would send it to a dead server for ever
    url = url_of(served)
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    training = service.create_lora_training_client("tiny-random", rank=2, seed=0)
    data = ragged(0, [500] * 8)
    training.forward_backward(ragged(0, [4]), "cross_entropy").result()
    futures: list[Any] = [training.forward_backward(data, "cross_entropy") for _ in range(40)]
    futures[0].result()
    served.kill(number)
    outcomes = []
    for future in futures:
        try:
            outcomes.append(future.result().metrics["loss:sum"])
        except tinker.RequestFailedError as error:
            outcomes.append("stopping" if "the server" in str(error) else str(error))
    done = served.wait()
    assert done.code == 0, done.err
    answered = [each for each in outcomes if isinstance(each, float)]
    assert len(set(answered)) == 1, "requests that were started are complete"
    assert outcomes == [*answered, *["stopping"] * (40 - len(answered))]
    assert 1 <= len(answered) < 40
    service.holder.close()


def test_an_idle_server_ends_at_once(served: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a client that is connected, and with connections that have sent nothing."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # the SDK would send it to a dead server for ever
    url = url_of(served)
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    sampling = service.create_sampling_client(base_model="tiny-random")
    sampling.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result()
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, int(port))))
        began = time.monotonic()
        served.kill(signal.SIGTERM)
        assert served.wait().code == 0
        # A second is promised; it took from 5 to 24, most of it after "Stopped.".
        assert time.monotonic() - began < 8
    service.holder.close()


def test_a_killed_client_is_logged(command: CommandRunner, tmp_path: Path) -> None:
    args = ("--port", "0", "--base-model", "tiny-random", "--client-timeout", "1")
    started = command.start("serve", *args, "--checkpoints", str(tmp_path / "c"), cwd=tmp_path)
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
    url = f"{url_of(started)}/api/v1/create_session"
    session = httpx.post(url, json=body).json()["session_id"]  # and nothing more
    line = f"session {session} was lost: its client has sent nothing for 1 seconds."
    while line not in started.err.read_text():
        time.sleep(0.01)
    started.kill(signal.SIGTERM)
    assert started.wait().code == 0


def test_hosts_and_budgets_are_options(command: CommandRunner, tmp_path: Path) -> None:
    args = ["--allowed-host", "box", "--max-loss-bytes", "1", "--loss-seconds", "0"]
    done = command.run("serve", *args, "--base-model", "tiny-random", cwd=tmp_path)
    assert done.code == 1
    assert "loss_seconds must be a finite number > 0, got 0.0" in done.err
    started = command.start(
        "serve", "--port", "0", *args[:2], "--base-model", "tiny-random", cwd=tmp_path
    )
    for host, status in (("box", 200), ("evil.com", 421)):
        found = httpx.get(f"{url_of(started)}/api/v1/healthz", headers={"Host": host})
        assert found.status_code == status
    started.kill(signal.SIGTERM)
    assert started.wait().code == 0


def test_an_occupied_port_is_an_error(command: CommandRunner, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        args = ("--port", port, "--base-model", "tiny-random")
        done = command.run("serve", *args, cwd=tmp_path)
    assert done.code == 1
    assert f"host and port must be free to listen on, and 127.0.0.1:{port} is not" in done.err
    assert "Choose another port" in done.err


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example.com", "::"])
def test_a_public_host_requires_an_api_key(
    command: CommandRunner, tmp_path: Path, host: str
) -> None:
    done = command.run("serve", "--host", host, "--base-model", "tiny-random", cwd=tmp_path)
    assert done.code == 1
    assert done.err == (
        "InputError: host must be a loopback address such as 127.0.0.1 unless there is an API "
        f"key, got {host!r}: pass api_key (--api-key), or others could use this machine.\n"
    )


def test_an_invalid_key_is_not_printed(command: CommandRunner, tmp_path: Path) -> None:
    args = ("--api-key", "hunter2", "--base-model", "tiny-random")
    done = command.run("serve", *args, cwd=tmp_path)
    assert done.code == 1
    assert "api_key must start with 'tml-'" in done.err
    assert "hunter2" not in done.err + done.out


def test_a_file_is_no_folder_of_checkpoints(command: CommandRunner, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    args = ("--port", "0", "--base-model", "tiny-random", "--checkpoints", "file")
    done = command.run("serve", *args, cwd=tmp_path)
    assert done.code == 2
    assert "'--checkpoints'" in done.err


def test_an_unknown_model_is_an_error(command: CommandRunner, tmp_path: Path) -> None:
    done = command.run("serve", "--port", "0", "--base-model", "no-such", cwd=tmp_path)
    assert done.code == 1
    assert done.err.startswith(
        "ModelError: base_model must be a known name (smollm2-135m, tiny-random)"
    )


def test_requests_need_the_key(
    command: CommandRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")  # the SDK would send it with a wrong key for ever
    started = command.start(
        "serve", "--port", "0", "--base-model", "tiny-random",
        cwd=tmp_path, env={"STEELYARD_API_KEY": "tml-mine"},
    )  # fmt: skip
    url = url_of(started)
    assert "export TINKER_API_KEY=tml-mine" in started.out.read_text()
    with pytest.raises(tinker.AuthenticationError):
        tinker.ServiceClient(base_url=url, api_key="tml-local").create_sampling_client(
            base_model="x"
        )
    with tinker.ServiceClient(base_url=url, api_key="tml-mine") as service:
        sampling = service.create_sampling_client(base_model="tiny-random")
        prompt = types.ModelInput.from_ints([1])
        drawn = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
        assert len(drawn.sequences[0].tokens) == 1
    started.kill(signal.SIGTERM)
    assert started.wait().code == 0
