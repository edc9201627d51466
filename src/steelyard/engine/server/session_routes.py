"""Endpoints for configuration, client sessions and uploaded losses."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Literal

import pydantic
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tinker import types
from tinker.types.health_response import HealthResponse
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest
from tinker.types.session_heartbeat_response import SessionHeartbeatResponse
from tinker.types.telemetry_response import TelemetryResponse

from steelyard.engine.server import codec, http_bodies
from steelyard.engine.server.http_errors import FORBIDDEN, conflict
from steelyard.engine.server.state import ServerState
from steelyard.engine.server.uploaded_loss import validate_loss

# The capabilities of this server; the other fields keep the SDK's defaults.
CONFIG = types.ClientConfigResponse(
    custom_loss_server_side=True,
    create_model_via_load_weights=True,
    sample_use_retrieve_futures=True,
    sample_join_sampling_session=True,
)
_DYNAMIC_CONFIG = types.ClientDynamicConfigResponse(sample_cancel_enabled=True)
_MAX_GRAPH_BYTES = 2**20


class FinishSessionRequest(pydantic.BaseModel):
    """Body of a request to finish a session."""

    class Reason(pydantic.BaseModel):
        """Reason for the end of a session."""

        type: Literal["success", "errored", "interrupted"]

    reason: Reason
    detail: str | None = None


async def healthz(_: ServerState, __: Request) -> Response:
    """Answer a health check."""
    return http_bodies.json_response(HealthResponse(status="ok"))


async def client_config(state: ServerState, request: Request) -> Response:
    """Return the capabilities of the server."""
    await http_bodies.read_json(request, types.ClientConfigRequest, state.settings.max_body)
    response = http_bodies.json_response(CONFIG)
    # The SDK opens a connection for this request alone, and never closes it.
    response.headers["connection"] = "close"
    return response


async def client_dynamic_config(state: ServerState, request: Request) -> Response:
    """Return the capabilities that can change while a client is connected."""
    await http_bodies.read_json(request, types.ClientConfigRequest, state.settings.max_body)
    return http_bodies.json_response(_DYNAMIC_CONFIG)


async def get_server_capabilities(state: ServerState, _: Request) -> Response:
    """List the base models on offer."""
    return http_bodies.json_response(state.models.capabilities())


async def create_session(state: ServerState, request: Request) -> Response:
    """Open a session."""
    body = await http_bodies.read_json(request, types.CreateSessionRequest, state.settings.max_body)
    session = state.sessions.create(body.user_metadata, body.display_name)
    return http_bodies.json_response(types.CreateSessionResponse(session_id=session.session_id))


async def session_heartbeat(state: ServerState, request: Request) -> Response:
    """Record that a client is alive."""
    body = await http_bodies.read_json(request, SessionHeartbeatRequest, state.settings.max_body)
    state.sessions.get(body.session_id).heartbeats += 1
    return http_bodies.json_response(SessionHeartbeatResponse())


async def finish_session(state: ServerState, request: Request) -> Response:
    """End a session."""
    await http_bodies.read_json(request, FinishSessionRequest, state.settings.max_body)
    session_id = request.path_params["session_id"]
    state.sessions.get(session_id)
    state.end_session(session_id, "the client has closed its session.")
    return JSONResponse(None)


async def create_custom_loss(state: ServerState, request: Request) -> Response:
    """Validate and store an uploaded loss."""
    body = await http_bodies.read_json(request, types.CreateCustomLossRequest, _MAX_GRAPH_BYTES)
    session = state.sessions.get(body.session_id)
    loss_id = f"{body.session_id}:loss:{body.custom_loss_seq_id}"
    future = state.futures.get(loss_id)
    if future is None:
        _check_loss_limit(state, session.losses, loss_id)
        loss = await asyncio.to_thread(validate_loss, body, state.settings.max_nodes)
        _check_loss_limit(state, session.losses, loss_id)  # others were uploaded meanwhile
        state.loss_process.warm()
        if session.losses.setdefault(loss_id, loss) != loss:
            raise conflict("custom_loss_seq_id", str(body.custom_loss_seq_id), "a loss", "another")
        future = state.futures.create(
            loss_id, "create_custom_loss", session.session_id, codec.hash_json(body)
        )
        future.settle(codec.encode_json(types.CreateCustomLossResponse(loss_id=loss_id)))
    future.check_repeated("create_custom_loss", codec.hash_json(body))
    return http_bodies.future_response(future)


def _check_loss_limit(state: ServerState, losses: Collection[str], loss_id: str) -> None:
    if loss_id not in losses and len(losses) >= state.settings.max_losses:
        raise HTTPException(
            FORBIDDEN, f"a client may upload at most {state.settings.max_losses} losses."
        )


async def telemetry(state: ServerState, request: Request) -> Response:
    """Accept the SDK's telemetry and discard it."""
    await http_bodies.read_json(request, types.TelemetrySendRequest, state.settings.max_body)
    return http_bodies.json_response(TelemetryResponse(status="accepted"))
