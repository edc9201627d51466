"""The server: its routes of the Tinker protocol, access control, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from steelyard.engine.server import (
    listing_routes,
    sampling_routes,
    session_routes,
    training_routes,
)
from steelyard.engine.server.http_messages import (
    FORBIDDEN,
    MISDIRECTED,
    UNAUTHORIZED,
    json_response,
    one_line,
    to_http_exception,
)
from steelyard.engine.server.http_server import AllowedHosts, HttpServer, check_host, listen
from steelyard.engine.server.state import BaseModels, ServerSettings, ServerState
from steelyard.engine.service_client import LocalServiceClient
from steelyard.errors import InputError, SteelyardError

_LOG = logging.getLogger(__name__)

Handler = Callable[[ServerState, Request], Awaitable[Response | pydantic.BaseModel | None]]
_CHECKPOINT = "training_runs/{run}/checkpoints/{checkpoint:path}"
ROUTES: list[tuple[str, str, Handler]] = [
    ("GET", "healthz", session_routes.healthz),
    ("POST", "client/config", session_routes.client_config),
    ("POST", "client/dynamic_config", session_routes.client_dynamic_config),
    ("GET", "get_server_capabilities", session_routes.get_server_capabilities),
    ("POST", "create_session", session_routes.create_session),
    ("POST", "session_heartbeat", session_routes.session_heartbeat),
    ("POST", "sessions/{session_id}/finish", session_routes.finish_session),
    ("POST", "create_custom_loss", session_routes.create_custom_loss),
    ("POST", "telemetry", session_routes.telemetry),
    ("POST", "create_model", training_routes.create_model),
    ("POST", "get_info", training_routes.get_info),
    ("POST", "unload_model", training_routes.unload_model),
    ("POST", "forward_backward", training_routes.forward_backward),
    ("POST", "optim_step", training_routes.optim_step),
    ("POST", "save_weights", training_routes.save_weights),
    ("POST", "load_weights", training_routes.load_weights),
    ("POST", "save_weights_for_sampler", training_routes.save_weights_for_sampler),
    ("POST", "create_sampling_session", sampling_routes.create_sampling_session),
    ("POST", "join_sampling_session", sampling_routes.join_sampling_session),
    ("POST", "asample", sampling_routes.asample),
    ("GET", "samplers/{sampler_id}", sampling_routes.get_sampler),
    ("POST", "retrieve_future", session_routes.retrieve_future),
    ("POST", "retrieve_futures", session_routes.retrieve_futures),
    ("POST", "cancel_future", session_routes.cancel_future),
    ("GET", "training_runs", listing_routes.list_training_runs),
    ("GET", "training_runs/{run}", listing_routes.get_training_run),
    ("GET", "training_runs/{run}/checkpoints", listing_routes.list_checkpoints),
    ("PUT", f"{_CHECKPOINT}/ttl", listing_routes.set_checkpoint_ttl),
    ("POST", f"{_CHECKPOINT}/publish", listing_routes.publish_checkpoint),
    ("DELETE", f"{_CHECKPOINT}/publish", listing_routes.publish_checkpoint),
    ("DELETE", _CHECKPOINT, listing_routes.delete_checkpoint),
    ("GET", "checkpoints", listing_routes.list_user_checkpoints),
    ("POST", "weights_info", listing_routes.weights_info),
    ("GET", "sessions", listing_routes.list_sessions),
    ("GET", "sessions/{session_id}", listing_routes.get_session),
]


def make_app(state: ServerState, hosts: AllowedHosts) -> Starlette:
    """Application that serves a server state to requests for `hosts`."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        cleanup = asyncio.create_task(state.clean_up_forever())
        yield
        cleanup.cancel()

    return Starlette(
        routes=[
            Route(f"/api/v1/{path}", partial(_handle, state, handler), methods=[method])
            for method, path, handler in ROUTES
        ],
        middleware=[Middleware(AccessMiddleware, api_key=state.settings.api_key, hosts=hosts)],
        exception_handlers={HTTPException: _error_response},
        lifespan=lifespan,
    )


class AccessMiddleware:
    """Rejects requests without the API key, for other hosts, and all requests from web pages.

    A browser sends `Origin` with the cross-origin requests of a page, and the SDK never does: so a
    page that the user visits cannot reach a server on loopback. A page whose name was made to
    resolve to loopback sends no `Origin`, but that name as `Host`.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: AllowedHosts) -> None:
        self._app = app
        self._hosts = hosts
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or reject it."""
        if scope["type"] == "http":
            error = self._check(Request(scope))
            if error is not None:
                response = _error_response(Request(scope), error)
                # The body is left unread: close the connection instead of draining it.
                response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> HTTPException | None:
        host = request.headers.get("host", "")
        if host not in self._hosts:
            return HTTPException(
                MISDIRECTED,
                f"Host must be a name of this server, got {host[:99]!r}: start it with "
                f"allowed_hosts (--allowed-host) if clients reach it by that name.",
            )
        if "origin" in request.headers:
            return HTTPException(FORBIDDEN, "web pages are not allowed to use this server.")
        key = request.headers.get("x-api-key", "").encode()
        # In constant time: the time of `==` would tell how long a guessed prefix is right.
        if self._key is not None and not hmac.compare_digest(key, self._key):
            return HTTPException(
                UNAUTHORIZED, "the API key must be the one the server was started with."
            )
        return None


async def _handle(state: ServerState, handler: Handler, request: Request) -> Response:
    try:
        result = await handler(state, request)
    except (HTTPException, SteelyardError) as error:
        return _error_response(request, error)
    except Exception as error:  # noqa: BLE001 - one request must not stop the server
        return _internal_error_response(request, error)
    return result if isinstance(result, Response) else json_response(result)


def _error_response(_: Request, error: Exception) -> Response:
    http_error = to_http_exception(error)
    return JSONResponse(
        {"detail": one_line(http_error)},
        status_code=http_error.status_code,
        headers=http_error.headers,
    )


def _internal_error_response(request: Request, error: Exception) -> Response:
    _LOG.error("%s failed", request.url.path, exc_info=error)
    # The SDK obeys the header and does not retry. The message is only logged: it could hold a path.
    return JSONResponse(
        {"detail": f"the server failed: {type(error).__name__}"},
        status_code=500,
        headers={"x-should-retry": "false"},
    )


class RunningServer:
    """The engine, the server state and the web server.

    Args:
        base_models: the names of the models on offer; they are loaded before the server listens.
        host: the address to listen on.
        port: the port to listen on; 0 takes a free one.
        engine: arguments of `LocalServiceClient`.
        settings: arguments of `ServerSettings`.

    Attributes:
        base_url: the URL for clients.
        models: the base models on offer.
    """

    def __init__(
        self,
        base_models: Sequence[str],
        host: str,
        port: int,
        engine: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        limits = _parse_settings(settings)
        check_host(host, limits.api_key)
        if not base_models:
            raise InputError("base_model must name at least one model, got none.")
        listener, self.base_url = listen(host, port)
        try:
            service = LocalServiceClient(**engine)
            contexts = {name: service.load(name).context for name in base_models}
            self.models = BaseModels(contexts)
            self._state = ServerState(service, self.models, limits)
            self._server = HttpServer(
                make_app(self._state, AllowedHosts(host, limits.allowed_hosts)),
                listener,
                name="steelyard-serve",
                max_connections=limits.max_connections,
            )
        except BaseException:
            listener.close()
            raise

    def warm(self) -> None:
        """Start the process of uploaded losses, without waiting for it.

        The first upload would wait until it has imported torch.
        """
        self._state.loss_processes.warm()

    def stop(self) -> None:
        """Finish the running step, fail the queued requests, and stop listening."""
        asyncio.run_coroutine_threadsafe(self._state.stop(), self._server.loop).result()
        self._server.stop()


def _parse_settings(settings: Mapping[str, Any]) -> ServerSettings:
    try:
        return ServerSettings(**settings)
    except TypeError as error:
        known = sorted(ServerSettings.__dataclass_fields__)
        raise InputError(
            f"the settings of a server are {known}, got {sorted(settings)}."
        ) from error
