"""The desk: who is here, what they train, and the one way in which work is taken on.

Everything here runs on the event loop, so that nothing needs a lock. Requests are checked in
threads, and models work on the engine's threads.
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
from steelyard.engine.server.futures import Answer, ServerFuture, ServerFutures, failure
from steelyard.engine.server.http_errors import FORBIDDEN, STOPPING, not_found
from steelyard.engine.server.sampling_sessions import SamplingSessions
from steelyard.engine.server.sequencer import Sequencer
from steelyard.engine.server.sessions import Sessions
from steelyard.engine.server.settings import ServerSettings
from steelyard.engine.service_client import LocalServiceClient
from steelyard.engine.training_client import LocalTrainingClient

T = TypeVar("T")

_LONGEST_NAP = 5.0
_LAST_WORDS = 1.0


@dataclass(eq=False)
class TrainingRun:
    """A model in training.

    Attributes:
        model_id: its name.
        session_id: its client's.
        client: the engine's client.
        line: where its requests wait.
        used: when it was last asked for something, in seconds since the epoch.
    """

    model_id: str
    session_id: str
    client: LocalTrainingClient
    line: Sequencer
    used: float = field(default_factory=time.time)


class ServerState:
    """The state of a server.

    Args:
        service: the engine.
        models: the base models on offer.
        settings: the limits.
    """

    def __init__(
        self, service: LocalServiceClient, models: BaseModels, settings: ServerSettings
    ) -> None:
        self.service = service
        self.models = models
        self.settings = settings
        self.sessions = Sessions(settings.max_sessions)
        self.tickets = ServerFutures()
        self.runs: dict[str, TrainingRun] = {}
        self.samplers = SamplingSessions(settings.max_samplers)
        self.making: set[str] = set()
        self.stopping = False
        self._tasks: set[asyncio.Task[object]] = set()

    def run(self, model_id: str) -> TrainingRun:
        """The model of that name; its client is heard of with this.

        Raises:
            HTTPException: it is not here.
        """
        run = self.runs.get(model_id)
        if run is None:
            raise not_found(
                "model_id",
                model_id,
                "a model is unloaded when its client closes or is not heard of for "
                f"{self.settings.client_timeout:g} seconds",
            )
        self.sessions.heard(run.session_id)
        run.used = time.time()
        return run

    async def submit(
        self,
        run: TrainingRun,
        number: int | None,
        verb: str,
        check: Callable[[], Callable[[], Future[T]]],
        encode: Callable[[T], Answer],
    ) -> ServerFuture:
        """Take on a request of a model, to be begun when its turn comes.

        Args:
            run: the model.
            number: the request's; None: it comes next.
            verb: what is asked.
            check: checks it, in a thread, and gives the call.
            encode: makes the answer of what the call gives.

        Raises:
            HTTPException: it is turned away. What stands behind it does not wait.
            SteelyardError: so too.
        """
        if number is None:
            number = run.line.free
        ticket = run.line.known(number, verb)
        if ticket is not None:
            return ticket
        ticket = run.line.take(number, verb, run.session_id)

        async def prepare() -> None:
            try:
                call = await asyncio.to_thread(check)
            except Exception as error:  # noqa: BLE001 - the client hears of it
                run.line.skip(number)
                ticket.turn_away(error)
            else:
                run.line.ready(number, lambda: begin(ticket, call, encode))

        # Apart from the connection: if that is cut now, the request is not left half taken.
        await self.apart(prepare())
        return ticket

    async def apart(self, work: Awaitable[T]) -> T:
        """What `work` gives; it goes on if whoever asked for it has gone."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def room_for(self, model_id: str) -> None:
        """Nothing, if another model may be made.

        Raises:
            HTTPException: there are too many.
        """
        most = self.settings.max_models
        if model_id not in self.runs and len(self.runs.keys() | self.making) >= most:
            raise HTTPException(
                FORBIDDEN,
                f"at most {most} models may be in training at once: close a client that has one, "
                f"or start the server with a larger max_models.",
            )

    def unload(self, model_id: str, why: str) -> None:
        """Give up a model; what runs is finished, what waits is not begun."""
        run = self.runs.pop(model_id, None)
        if run is not None:
            for ticket in self.tickets:
                if ticket.name.startswith(f"{model_id}:"):
                    ticket.abandon(why)

    def end_session(self, session_id: str, why: str) -> None:
        """A client has gone: with its models, samplers and requests."""
        self.sessions.end(session_id)
        for run in [run for run in self.runs.values() if run.session_id == session_id]:
            self.unload(run.model_id, why)
        self.samplers.end_session(session_id)
        for ticket in self.tickets:
            if ticket.session_id == session_id:
                ticket.abandon(why)
                self.tickets.drop(ticket)

    async def keep_order(self) -> None:
        """Send away those who have gone, and drop what nobody comes for; for ever."""
        limits = self.settings
        shortest = min(limits.client_timeout, limits.gap_seconds, limits.keep_seconds)
        while True:
            await asyncio.sleep(min(shortest / 4, _LONGEST_NAP))
            for session_id in self.sessions.silent(limits.client_timeout):
                self.end_session(session_id, "the client was not heard of any more.")
            for run in list(self.runs.values()):
                run.line.close_gap(limits.gap_seconds)
            self.tickets.forget_fetched(limits.keep_seconds)

    async def stop(self) -> None:
        """Finish what runs, and give up what waits."""
        self.stopping = True
        for ticket in self.tickets:
            ticket.abandon(STOPPING, RequestErrorCategory.Server)
        await asyncio.to_thread(self.service.close, "success")
        for ticket in self.tickets:
            ticket.settle(failure(STOPPING, RequestErrorCategory.Server))
        self.samplers.wake()
        if list(self.sessions):
            # They fetch the bad news and report it, to a server that must still be there: else
            # the SDK tries to for half a minute before it raises.
            await asyncio.sleep(_LAST_WORDS)

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            task.exception()  # whoever waits for it has heard of it


def begin(
    ticket: ServerFuture, call: Callable[[], Future[T]], encode: Callable[[T], Answer]
) -> None:
    """Hand work to the engine; its answer settles the ticket."""
    if ticket.answer is not None:  # given up while it waited
        return
    try:
        work = call()
    except Exception as error:  # noqa: BLE001 - the client hears of it
        with contextlib.suppress(Exception):  # it has its promise already
            ticket.turn_away(error)
    else:
        ticket.follow(work, encode)
