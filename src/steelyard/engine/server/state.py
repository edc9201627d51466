"""Server state: sessions, futures, models in training and samplers, and how requests are queued.

Everything in this module runs on the event loop, so that no lock is needed. Requests are
validated in threads, and models run on the engine's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
from steelyard.engine.server.sampling_sessions import SamplingSession, SamplingSessions
from steelyard.engine.server.sequencer import Sequencer
from steelyard.engine.server.sessions import Sessions
from steelyard.engine.server.settings import ServerSettings
from steelyard.engine.server.uploaded_loss import LossProcess
from steelyard.engine.service_client import LocalServiceClient
from steelyard.engine.training_client import LocalTrainingClient

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
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
        payload: a hash of the request that created it.
        last_used: time of the last request, in seconds since the epoch.
    """

    model_id: str
    session_id: str
    client: LocalTrainingClient
    sequencer: Sequencer
    payload: bytes | None = None
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
        loss_thread: waits for the uploaded losses, one at a time. The engine's thread, where the
            passes of all models run, does not wait for them.
        loss_process: runs the uploaded losses.
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
        self.loss_thread = ThreadPoolExecutor(1, "steelyard-loss")
        self.loss_process = LossProcess()
        self.stopping = False
        self._tasks: set[asyncio.Task[object]] = set()

    def get_run(self, model_id: str) -> TrainingRun:
        """Return a model in training and record that its client is alive.

        Raises:
            HTTPException: it does not exist, or was unloaded.
        """
        run = self.runs.get(model_id)
        if run is None:
            self.sessions.check_instance("model_id", model_id)
            raise not_found(
                "model_id",
                model_id,
                "a model is unloaded when its client closes or sends nothing for "
                f"{self.settings.client_timeout:g} seconds",
            )
        self.sessions.touch(run.session_id)
        run.last_used = time.time()
        return run

    def get_sampler(self, sampler_id: str) -> SamplingSession:
        """Return a sampler.

        Raises:
            HTTPException: it does not exist, or was dropped.
        """
        if sampler_id not in self.samplers:
            self.sessions.check_instance("sampling_session_id", sampler_id)
        return self.samplers.get(sampler_id)

    async def submit(
        self,
        run: TrainingRun,
        seq_id: int | None,
        request_type: str,
        validate: Callable[[], Callable[[], Future[T]]],
        encode: Callable[[T], EncodedResult],
        *,
        payload: bytes | None = None,
        exclusive: bool = False,
    ) -> ServerFuture:
        """Validate a request of a model and queue it; a repeated request returns its old future.

        Args:
            run: the model.
            seq_id: the sequence id; None takes the next free one.
            request_type: the type of the request.
            validate: checks the request, in a thread, and returns the call that runs it.
            encode: encodes the value of that call.
            payload: a hash of the content of the request.
            exclusive: whether later requests of the model wait until this one is done; others are
                kept in order by the engine's thread.

        Raises:
            HTTPException: the request is rejected. Later requests do not wait for it.
            SteelyardError: likewise.
        """
        if seq_id is None:
            seq_id = run.sequencer.next_free
        future = run.sequencer.find(seq_id, request_type, payload)
        if future is not None:
            return future
        future = run.sequencer.create_future(seq_id, request_type, run.session_id, payload)

        def start(call: Callable[[], Future[T]]) -> Future[T] | None:
            engine_future = start_call(future, call, encode)
            return engine_future if exclusive else None

        async def prepare() -> None:
            try:
                call = await asyncio.to_thread(validate)
            except Exception as error:  # noqa: BLE001 - reported to the client
                run.sequencer.skip(seq_id)
                future.reject(error)
            else:
                run.sequencer.mark_ready(seq_id, lambda: start(call))

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
                _LOG.warning(
                    "session %s was lost: its client has sent nothing for %g seconds. "
                    "Unloading %d of its models and %d of its samplers.",
                    session_id,
                    limits.client_timeout,
                    sum(run.session_id == session_id for run in self.runs.values()),
                    len(self.samplers.of_session(session_id)),
                )
                self.end_session(session_id, "the client has sent nothing for too long.")
            for run in list(self.runs.values()):
                run.sequencer.fail_stalled(limits.gap_seconds)
            self.futures.drop_fetched(limits.keep_seconds)

    async def stop(self) -> None:
        """Finish the running requests, fail the queued ones and close the engine."""
        self.stopping = True
        pending = any(future.result is None for future in self.futures)
        for future in self.futures:
            future.cancel(STOPPING, RequestErrorCategory.Server)
        # First the losses: one that runs still needs the engine.
        await asyncio.to_thread(self.loss_thread.shutdown, wait=True, cancel_futures=True)
        await asyncio.to_thread(self.loss_process.close)
        await asyncio.to_thread(self.service.close, "success")
        for future in self.futures:
            future.settle(failed_result(STOPPING, RequestErrorCategory.Server))
        self.samplers.wake()
        if pending:
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
) -> Future[T] | None:
    """Hand a call to the engine; its outcome settles the future. Returns the engine's future."""
    if future.result is not None:  # cancelled while it was queued
        return None
    try:
        engine_future = call()
    except Exception as error:  # noqa: BLE001 - reported to the client
        # The client already has the request id: the future reports the error.
        with contextlib.suppress(Exception):
            future.reject(error)
        return None
    future.settle_from(engine_future, encode)
    return engine_future
