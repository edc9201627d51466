"""Endpoints of client sessions: configuration, heartbeats, uploaded losses, request results."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Literal

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest
from tinker.types.futures_retrieve_response import FuturesRetrieveResponse
from tinker.types.health_response import HealthResponse
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest
from tinker.types.session_heartbeat_response import SessionHeartbeatResponse
from tinker.types.telemetry_response import TelemetryResponse
from tinker.types.try_again_response import TryAgainResponse

from steelyard.engine.server import codec, http_messages
from steelyard.engine.server.http_messages import FORBIDDEN, GONE, STOPPING, conflict, not_found
from steelyard.engine.server.state import ServerState
from steelyard.engine.server.uploaded_loss.validate import validate_loss

# The capabilities of this server; the other fields keep the SDK's defaults.
CONFIG = types.ClientConfigResponse(
    custom_loss_server_side=True,
    create_model_via_load_weights=True,
    sample_use_retrieve_futures=True,
    sample_join_sampling_session=True,
)
_DYNAMIC_CONFIG = types.ClientDynamicConfigResponse(sample_cancel_enabled=True)
_MAX_GRAPH_BYTES = 2**20
# Not an error: with this status the SDK polls again at once.
_TRY_AGAIN = 408


class FinishSessionRequest(pydantic.BaseModel):
    """Body of a request to finish a session."""

    class Reason(pydantic.BaseModel):
        """Reason for the end of a session."""

        type: Literal["success", "errored", "interrupted"]

    reason: Reason
    detail: str | None = None


class CancelFutureRequest(pydantic.BaseModel):
    """Body of a cancel_future request."""

    request_id: str


async def healthz(_: ServerState, __: Request) -> HealthResponse:
    """Answer a health check."""
    return HealthResponse(status="ok")


async def client_config(state: ServerState, request: Request) -> Response:
    """Return the capabilities of the server."""
    await state.read(request, types.ClientConfigRequest)
    response = http_messages.json_response(CONFIG)
    # The SDK opens a connection for this request alone, and never closes it.
    response.headers["connection"] = "close"
    return response


async def client_dynamic_config(
    state: ServerState, request: Request
) -> types.ClientDynamicConfigResponse:
    """Return the capabilities that can change while a client is connected."""
    await state.read(request, types.ClientConfigRequest)
    return _DYNAMIC_CONFIG


async def get_server_capabilities(
    state: ServerState, _: Request
) -> types.GetServerCapabilitiesResponse:
    """List the base models on offer."""
    return state.models.capabilities()


async def create_session(state: ServerState, request: Request) -> types.CreateSessionResponse:
    """Open a session."""
    body = await state.read(request, types.CreateSessionRequest)
    session = state.sessions.create(body.user_metadata, body.display_name)
    return types.CreateSessionResponse(session_id=session.session_id)


async def session_heartbeat(state: ServerState, request: Request) -> SessionHeartbeatResponse:
    """Record that a client is alive."""
    body = await state.read(request, SessionHeartbeatRequest)
    state.sessions.get(body.session_id).heartbeats += 1
    return SessionHeartbeatResponse()


async def finish_session(state: ServerState, request: Request) -> None:
    """End a session."""
    await state.read(request, FinishSessionRequest)
    session_id = request.path_params["session_id"]
    state.sessions.get(session_id)
    state.end_session(session_id, "the client has closed its session.")


async def create_custom_loss(state: ServerState, request: Request) -> types.UntypedAPIFuture:
    """Validate and store an uploaded loss."""
    body = await http_messages.read_json(request, types.CreateCustomLossRequest, _MAX_GRAPH_BYTES)
    session = state.sessions.get(body.session_id)
    loss_id = f"{body.session_id}:loss:{body.custom_loss_seq_id}"
    future = state.futures.get(loss_id)
    if future is None:
        _check_loss_limit(state, session.losses, loss_id)
        loss = await asyncio.to_thread(validate_loss, body, state.settings.max_nodes)
        _check_loss_limit(state, session.losses, loss_id)  # others were uploaded meanwhile
        state.loss_processes.warm()
        if session.losses.setdefault(loss_id, loss) != loss:
            raise conflict("custom_loss_seq_id", str(body.custom_loss_seq_id), "a loss", "another")
        future = state.futures.create(
            loss_id, "create_custom_loss", session.session_id, codec.hash_json(body)
        )
        future.settle(codec.encode_json(types.CreateCustomLossResponse(loss_id=loss_id)))
    future.check_repeated("create_custom_loss", codec.hash_json(body))
    return future.reference()


def _check_loss_limit(state: ServerState, losses: Collection[str], loss_id: str) -> None:
    if loss_id not in losses and len(losses) >= state.settings.max_losses:
        raise HTTPException(
            FORBIDDEN, f"a client may upload at most {state.settings.max_losses} losses."
        )


async def telemetry(state: ServerState, request: Request) -> TelemetryResponse:
    """Accept the SDK's telemetry and discard it."""
    await state.read(request, types.TelemetrySendRequest)
    return TelemetryResponse(status="accepted")


async def retrieve_future(state: ServerState, request: Request) -> Response:
    """Return the result of a request; hold the connection until it is available."""
    body = await state.read(request, FutureRetrieveRequest)
    future = state.futures.get(body.request_id)
    if future is None:
        state.sessions.check_instance("request_id", body.request_id)
        raise not_found("request_id", body.request_id, "results are kept for a while only")
    with state.sessions.polling(future.session_id):
        waiting = future.wait(state.settings.poll_seconds)
        result = await http_messages.wait_while_connected(request, waiting)
    if result is not None:
        return result.response()
    pending = TryAgainResponse(request_id=future.request_id, queue_state="active")
    return JSONResponse(pending.model_dump(), status_code=_TRY_AGAIN)


async def retrieve_futures(state: ServerState, request: Request) -> FuturesRetrieveResponse:
    """Return which requests of a sampler have completed; hold the connection until one has."""
    body = await state.read(request, FuturesRetrieveRequest)
    if state.stopping:
        raise HTTPException(GONE, STOPPING)
    sampler = state.get_sampler(body.target.sampling_session_id)
    for request_id in body.retrieved_request_ids:  # acknowledged, so the results can go
        future = state.futures.get(request_id)
        if future is not None and request_id.startswith(f"{sampler.sampler_id}:"):
            state.futures.drop(future)
    log = sampler.completions_of(body.target.cloned_sampler_id)
    with state.sessions.polling(sampler.session_id):
        waiting = log.read_after(body.prev_cursor, state.settings.poll_seconds)
        entries = await http_messages.wait_while_connected(request, waiting)
    completions, cursor = entries or ([], body.prev_cursor)
    return FuturesRetrieveResponse(completions=completions, cursor=cursor)


async def cancel_future(state: ServerState, request: Request) -> None:
    """Cancel a sampling request that has not started."""
    body = await state.read(request, CancelFutureRequest)
    future = state.futures.get(body.request_id)
    if future is not None and future.request_type == "asample":
        future.cancel("the request was cancelled.")
