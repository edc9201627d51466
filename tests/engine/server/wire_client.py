"""Servers for tests, and a client that can send requests out of order, twice, or malformed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from steelyard.engine.server.app import RunningServer


@contextmanager
def start(folder: Path, **settings: Any) -> Iterator[RunningServer]:
    """Run a server of tiny-random, with access to its state."""
    running = RunningServer(["tiny-random"], "127.0.0.1", 0, {"checkpoint_dir": folder}, settings)
    try:
        yield running
    finally:
        running.stop()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail after ten minutes."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Wire:
    """Plain HTTP client with a session."""

    def __init__(self, base_url: str, api_key: str = "tml-local") -> None:
        headers = {"X-API-Key": api_key}
        self.http = httpx.Client(base_url=f"{base_url}/api/v1", headers=headers, timeout=600)
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        self.session_id: str = self.ok("create_session", body)["session_id"]
        self._models = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.post(f"sessions/{self.session_id}/finish", {"reason": {"type": "success"}})
        self.http.close()

    def post(self, path: str, body: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return self.http.post(path, content=body)
        return self.http.post(path, json=body)

    def beat(self) -> None:
        """Send a heartbeat."""
        self.ok("session_heartbeat", {"session_id": self.session_id})

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Send heartbeats in a thread, however slow the test is."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(0.05):
                self.beat()

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def ok(self, path: str, body: Any) -> Any:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def model(self, rank: int = 4, seed: int = 0) -> str:
        model_seq_id, self._models = self._models, self._models + 1
        body = {
            "session_id": self.session_id,
            "model_seq_id": model_seq_id,
            "base_model": "tiny-random",
            "lora_config": {"rank": rank, "seed": seed},
        }
        model_id: str = self.result(self.ok("create_model", body))["model_id"]
        return model_id

    def batch(
        self,
        model_id: str,
        seq_id: int,
        data: Sequence[types.Datum],
        loss_fn: Any = "cross_entropy",
        config: Any = None,
        *,
        forward_only: bool = False,
    ) -> httpx.Response:
        body = encoded(model_id, seq_id, data, loss_fn, config, forward_only=forward_only)
        return self.http.post("forward_backward", content=body)

    def step(self, model_id: str, seq_id: int, rate: float = 0.01) -> httpx.Response:
        params = {"learning_rate": rate}
        return self.post(
            "optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": params}
        )

    def result(self, future: Any) -> Any:
        """Fetch the result of a future; a failure is returned as it is."""
        response = self.post("retrieve_future", {"request_id": future["request_id"]})
        while response.status_code == 408:
            response = self.post("retrieve_future", {"request_id": future["request_id"]})
        assert response.status_code == 200, response.text
        if "protobuf" in response.headers["content-type"]:
            return deserialize_forward_backward_output(response.content)
        return response.json()

    def probe(self, model_id: str, seq_id: int) -> types.ForwardBackwardOutput:
        """Output of the model for a fixed batch, which changes with the weights."""
        response = self.batch(model_id, seq_id, PROBE, forward_only=True)
        output: types.ForwardBackwardOutput = self.result(response.json())
        return output


def encoded(
    model_id: str,
    seq_id: int,
    data: Sequence[types.Datum],
    loss_fn: Any = "cross_entropy",
    config: Any = None,
    *,
    forward_only: bool = False,
) -> bytes:
    """Encode a forward_backward request as the SDK does."""
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=list(data), loss_fn=loss_fn, loss_fn_config=config
        ),
        model_id=model_id,
        seq_id=seq_id,
    )
    message = forward_backward_request_to_proto(request)
    message.forward_only = forward_only
    return message.SerializeToString()


PROBE = [
    types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7, 8]),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[6, 7, 8, 9], dtype="int64")},
    )
]


def error_of(response: httpx.Response) -> str:
    """Message of an HTTP error, checked to be one sentence on one line."""
    detail: str = response.json()["detail"]
    assert "\n" not in detail
    assert detail.endswith(".")
    return detail
