"""Server state: settings, sessions, futures, models in training and samplers; queueing of requests.

Everything in this module runs on the event loop, so that no lock is needed. Requests are
validated in threads, and models run on the engine's threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from tinker import types
from tinker.types import RequestErrorCategory

from steelyard.engine.model_sources import tokenizer_location
from steelyard.engine.server.futures import Sequencer, ServerFuture, ServerFutures, failed_result
from steelyard.engine.server.http_messages import (
    BAD_REQUEST,
    FORBIDDEN,
    STOPPING,
    EncodedResult,
    not_found,
    read_json,
)
from steelyard.engine.server.http_server import parse_host
from steelyard.engine.server.sessions import SamplingSession, SamplingSessions, Sessions
from steelyard.engine.server.uploaded_loss.loss_process import LossProcesses
from steelyard.engine.server.uploaded_loss.loss_queue import LossQueue
from steelyard.engine.service_client import LocalServiceClient, capabilities
from steelyard.engine.training_client import LocalTrainingClient
from steelyard.errors import InputError
from steelyard.spec.checks import is_finite, is_whole

M = TypeVar("M", bound=pydantic.BaseModel)
T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_MAX_CLEANUP_INTERVAL = 5.0
_SHUTDOWN_GRACE_SECONDS = 1.0
# Settings in seconds.
_TIMES = ("client_timeout", "gap_seconds", "keep_seconds", "loss_seconds", "poll_seconds")


@dataclass(frozen=True)
class ServerSettings:
    """Limits and timeouts of a server; the defaults suit one machine and one user.

    Attributes:
        api_key: the key that clients must send; None accepts every client.
        allowed_hosts: names by which clients reach the server beside its own, as in the `Host`
            header; `"*"` allows every name.
        max_body: the largest body of a request in bytes, both as sent and decompressed.
        max_tokens: the largest number of tokens in a request; for sampling, generated ones count.
        max_models: the largest number of models in training at once.
        max_samplers: the largest number of samplers; the least recently used one is dropped.
        max_sessions: the largest number of clients at once.
        max_waiting: the largest number of queued requests of one model.
        max_rank: the largest rank of an adapter.
        max_nodes: the largest number of operations in an uploaded loss.
        max_losses: the largest number of uploaded losses in a session.
        max_loss_bytes: the largest memory of an uploaded loss, for one datum.
        max_connections: the number of open connections from which on requests are answered with
            503, after which the SDK tries again.
        client_timeout: seconds without a request after which a client's session ends.
        poll_seconds: seconds for which a request for a pending result is held open.
        gap_seconds: seconds for which requests wait for a missing earlier one.
        keep_seconds: seconds for which a result is kept after its first fetch.
        loss_seconds: seconds that an uploaded loss may take for a batch.

    Raises:
        InputError: a setting breaks a rule.
    """

    api_key: str | None = None
    allowed_hosts: Sequence[str] = ()
    max_body: int = 64 * 2**20
    max_tokens: int = 2**20
    max_models: int = 64
    max_samplers: int = 64
    max_sessions: int = 1024
    max_waiting: int = 1024
    max_rank: int = 512
    max_nodes: int = 2048
    max_losses: int = 128
    max_loss_bytes: int = 2**30
    max_connections: int = 768
    client_timeout: float = 300.0
    poll_seconds: float = 20.0
    gap_seconds: float = 60.0
    keep_seconds: float = 60.0
    loss_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in _TIMES and not (is_finite(value) and value > 0):
                raise InputError(f"{name} must be a finite number > 0, got {value!r}.")
            if name.startswith("max_") and not is_whole(value, at_least=1):
                raise InputError(f"{name} must be a whole number >= 1, got {value!r}.")
        hosts = self.allowed_hosts
        is_list = isinstance(hosts, Sequence) and not isinstance(hosts, str)
        if not is_list or not all(map(_is_host, hosts)):
            raise InputError(
                f"allowed_hosts must be a list of host names such as ['gpu.example.org'], or "
                f"['*'] for all, got {hosts!r}."
            )
        # The SDK accepts no other keys, and a header carries no other characters as they are.
        if self.api_key is not None and not _is_key(self.api_key):
            raise InputError(
                "api_key must start with 'tml-', as the SDK wants it, and consist of visible ASCII "
                "characters, got one that does not."
            )


def _is_host(value: object) -> bool:
    return isinstance(value, str) and (value == "*" or parse_host(value) is not None)


def _is_key(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"tml-[!-~]*", value) is not None


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
        loss_queue: runs the passes of the uploaded losses.
        loss_processes: run the uploaded losses themselves.
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
        self.loss_queue = LossQueue()
        self.loss_processes = LossProcesses()
        self.stopping = False
        self._tasks: set[asyncio.Task[object]] = set()

    async def read(self, request: Request, model: type[M]) -> M:
        """Read a request in JSON.

        Raises:
            HTTPException: the body is too large or not a valid `model`.
        """
        return await read_json(request, model, self.settings.max_body)

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

        # Three stages, as a request waits twice: `prepare` runs now and waits for `validate` in a
        # thread, while requests after it are validated too. The sequencer runs `start` when its
        # turn comes. That hands `call` to the engine, whose thread runs it.
        def start(call: Callable[[], Future[T]]) -> Future[T] | None:
            if self.stopping:  # it came after `stop` had cancelled the ones before it
                future.cancel(STOPPING, RequestErrorCategory.Server)
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
        # Those that were handed to the engine last first: it goes on meanwhile, and must not run a
        # request of which an earlier one was cancelled.
        for future in sorted(self.futures, key=lambda future: future.start_number, reverse=True):
            future.cancel(STOPPING, RequestErrorCategory.Server)
        # First the losses: one that runs still needs the engine.
        await asyncio.to_thread(self.loss_queue.close)
        await asyncio.to_thread(self.loss_processes.close)
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


@dataclass(frozen=True)
class BaseModel:
    """A base model on offer.

    Attributes:
        name: the name with which the server was started.
        tokenizer: the path or Hub name of its tokenizer; clients can name the model by it too.
        context: the largest number of tokens in a sequence.
    """

    name: str
    tokenizer: str
    context: int


class BaseModels:
    """The base models on offer.

    Args:
        contexts: the context length of each model, by name.
    """

    def __init__(self, contexts: Mapping[str, int]) -> None:
        self.offered = [
            BaseModel(name, tokenizer_location(name), context) for name, context in contexts.items()
        ]

    def find(self, name: str) -> BaseModel:
        """Base model with a name or a tokenizer path.

        Raises:
            HTTPException: no such model is on offer.
        """
        for model in self.offered:
            if name in (model.name, model.tokenizer):
                return model
        names = ", ".join(model.name for model in self.offered)
        raise HTTPException(
            BAD_REQUEST,
            f"base_model must be one that this server was started with ({names}), got {name!r}.",
        )

    def capabilities(self) -> types.GetServerCapabilitiesResponse:
        """Response that lists the models for the SDK."""
        return capabilities({model.name: model.context for model in self.offered})
