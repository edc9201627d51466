"""Server state: sessions, futures, models in training and samplers, and how requests are queued.

Everything in this module runs on the event loop, so that no lock is needed. Requests are
validated in threads, and models run on the engine's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.exceptions import HTTPException
from tinker.types import RequestErrorCategory

from steelyard.engine.server.base_models import BaseModels
from steelyard.engine.server.futures import (
    EncodedResult,
    ServerFuture,
    ServerFutures,
    failed_result,
)
from steelyard.engine.server.http_errors import FORBIDDEN, STOPPING, not_found
from steelyard.engine.server.sampling_sessions import SamplingSessions
from steelyard.engine.server.sequencer import Sequencer
from steelyard.engine.server.sessions import Sessions
from steelyard.engine.server.settings import ServerSettings
from steelyard.engine.service_client import LocalServiceClient
from steelyard.engine.training_client import LocalTrainingClient

T = TypeVar("T")

_MAX_CLEANUP_INTERVAL = 5.0
_SHUTDOWN_GRACE_SECONDS = 1.0


@dataclass(eq=False)
class TrainingRun:
    """A model in training.

    Attributes:
        model_id: the id of the model.
        session_id: the id of the client's session.
        client: the engine's client.
        sequencer: the queue of its requests.
        last_used: time of the last request, in seconds since the epoch.
    """

    model_id: str
    session_id: str
    client: LocalTrainingClient
    sequencer: Sequencer
    last_used: float = field(default_factory=time.time)


class ServerState:
    """The state of a server.

    Args:
        service: the engine.
        models: the base models on offer.
        settings: the limits.

    Attributes:
        sessions: the open sessions.
        futures: the futures of all requests.
        runs: the models in training, by id.
        samplers: the sampling sessions.
        creating: the ids of the models that are being created.
        stopping: whether the server is shutting down.
    """

    def __init__(
        self, service: LocalServiceClient, models: BaseModels, settings: ServerSettings
    ) -> None:
        self.service = service
        self.models = models
        self.settings = settings
        self.sessions = Sessions(settings.max_sessions)
        self.futures = ServerFutures()
        self.runs: dict[str, TrainingRun] = {}
        self.samplers = SamplingSessions(settings.max_samplers)
        self.creating: set[str] = set()
        self.stopping = False
        self._tasks: set[asyncio.Task[object]] = set()

    def get_run(self, model_id: str) -> TrainingRun:
        """Return a model in training and record that its client is alive.

        Raises:
            HTTPException: it does not exist, or was unloaded.
        """
        run = self.runs.get(model_id)
        if run is None:
            raise not_found(
                "model_id",
                model_id,
                "a model is unloaded when its client closes or sends nothing for "
                f"{self.settings.client_timeout:g} seconds",
            )
        self.sessions.touch(run.session_id)
        run.last_used = time.time()
        return run

    async def submit(
        self,
        run: TrainingRun,
        seq_id: int | None,
        request_type: str,
        validate: Callable[[], Callable[[], Future[T]]],
        encode: Callable[[T], EncodedResult],
    ) -> ServerFuture:
        """Validate a request of a model and queue it; a repeated request returns its old future.

        Args:
            run: the model.
            seq_id: the sequence id; None takes the next free one.
            request_type: the type of the request.
            validate: checks the request, in a thread, and returns the call that runs it.
            encode: encodes the value of that call.

        Raises:
            HTTPException: the request is rejected. Later requests do not wait for it.
            SteelyardError: likewise.
        """
        if seq_id is None:
            seq_id = run.sequencer.next_free
        future = run.sequencer.find(seq_id, request_type)
        if future is not None:
            return future
        future = run.sequencer.create_future(seq_id, request_type, run.session_id)

        async def prepare() -> None:
            try:
                call = await asyncio.to_thread(validate)
            except Exception as error:  # noqa: BLE001 - reported to the client
                run.sequencer.skip(seq_id)
                future.reject(error)
            else:
                run.sequencer.mark_ready(seq_id, lambda: start_call(future, call, encode))

        # Detached: a connection that breaks here would cancel the handler, and leave a sequence id
        # that is neither ready nor skipped, which blocks all later requests.
        await self.run_detached(prepare())
        return future

    async def run_detached(self, work: Awaitable[T]) -> T:
        """Await `work`, which continues if the awaiting handler is cancelled."""
        task = asyncio.ensure_future(work)
        # The loop holds tasks by weak references only.
        self._tasks.add(task)
        task.add_done_callback(self._discard)
        return await asyncio.shield(task)

    def check_model_limit(self, model_id: str) -> None:
        """Raise if there are too many models to create another.

        Raises:
            HTTPException: `max_models` are in training or being created.
        """
        max_models = self.settings.max_models
        if model_id not in self.runs and len(self.runs.keys() | self.creating) >= max_models:
            raise HTTPException(
                FORBIDDEN,
                f"at most {max_models} models may be in training at once: close a client that has "
                f"one, or start the server with a larger max_models.",
            )

    def unload(self, model_id: str, reason: str) -> None:
        """Remove a model; the running request finishes, queued ones fail with `reason`."""
        run = self.runs.pop(model_id, None)
        if run is not None:
            for future in self.futures:
                if future.request_id.startswith(f"{model_id}:"):
                    future.cancel(reason)

    def end_session(self, session_id: str, reason: str) -> None:
        """End a session: remove its models, samplers and futures."""
        self.sessions.end(session_id)
        for run in [run for run in self.runs.values() if run.session_id == session_id]:
            self.unload(run.model_id, reason)
        self.samplers.end_session(session_id)
        for future in self.futures:
            if future.session_id == session_id:
                future.cancel(reason)
                self.futures.drop(future)

    async def clean_up_forever(self) -> None:
        """End silent sessions, fail stalled requests and drop fetched results, periodically."""
        limits = self.settings
        shortest = min(limits.client_timeout, limits.gap_seconds, limits.keep_seconds)
        while True:
            await asyncio.sleep(min(shortest / 4, _MAX_CLEANUP_INTERVAL))
            for session_id in self.sessions.silent(limits.client_timeout):
                self.end_session(session_id, "the client has sent nothing for too long.")
            for run in list(self.runs.values()):
                run.sequencer.fail_stalled(limits.gap_seconds)
            self.futures.drop_fetched(limits.keep_seconds)

    async def stop(self) -> None:
        """Finish the running requests, fail the queued ones and close the engine."""
        self.stopping = True
        for future in self.futures:
            future.cancel(STOPPING, RequestErrorCategory.Server)
        await asyncio.to_thread(self.service.close, "success")
        for future in self.futures:
            future.settle(failed_result(STOPPING, RequestErrorCategory.Server))
        self.samplers.wake()
        if list(self.sessions):
            # Clients fetch the failures and then send telemetry about them, to a server that must
            # still be there: otherwise the SDK retries for half a minute before it raises.
            await asyncio.sleep(_SHUTDOWN_GRACE_SECONDS)

    def _discard(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # retrieved, or asyncio logs it: the handler has reported it


def start_call(
    future: ServerFuture,
    call: Callable[[], Future[T]],
    encode: Callable[[T], EncodedResult],
) -> None:
    """Hand a call to the engine; its outcome settles the future."""
    if future.result is not None:  # cancelled while it was queued
        return
    try:
        engine_future = call()
    except Exception as error:  # noqa: BLE001 - reported to the client
        # The client already has the request id: the future reports the error.
        with contextlib.suppress(Exception):
            future.reject(error)
    else:
        future.settle_from(engine_future, encode)
