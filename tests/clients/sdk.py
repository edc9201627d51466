"""The SDK's own `TrainingClient`, its requests answered by the engine instead of a server.

Everything above the requests is the SDK's code: its custom loss, its futures, its event loop
in a thread. The tests of `engine/server` run it over HTTP.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import tinker
from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from steelyard.engine import LocalServiceClient, LocalTrainingClient


class Holder:
    """The part of the SDK's internal client holder that a training client uses: its event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run_coroutine_threadsafe(
        self, coroutine: Coroutine[Any, Any, Any]
    ) -> AwaitableConcurrentFuture[Any]:
        return AwaitableConcurrentFuture(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def get_session_id(self) -> str:
        return "session"

    def get_telemetry(self) -> None:
        return None

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Answered(tinker.TrainingClient):
    """The SDK's client; its requests are recorded, and answered by the engine."""

    def __init__(self, engine: LocalTrainingClient, holder: Holder) -> None:
        super().__init__(holder, 0, types.ModelID(engine.model_id))  # type: ignore[arg-type]
        self.engine = engine
        self.sent: list[tuple[str, Any]] = []

    def forward(self, data: Any, loss_fn: Any, loss_fn_config: Any = None) -> Any:
        self.sent.append(("forward", data))
        return self.engine.forward(data, loss_fn, loss_fn_config)

    def forward_backward(self, data: Any, loss_fn: Any, loss_fn_config: Any = None) -> Any:
        self.sent.append(("forward_backward", data))
        return self.engine.forward_backward(data, loss_fn, loss_fn_config)

    def optim_step(self, optim_params: Any = None, *, adam_params: Any = None) -> Any:
        self.sent.append(("optim_step", optim_params))
        return self.engine.optim_step(optim_params, adam_params=adam_params)


def engine(**options: Any) -> LocalTrainingClient:
    service = LocalServiceClient(device="cpu", **options)
    return service.create_lora_training_client("tiny-random", rank=2, seed=0)
