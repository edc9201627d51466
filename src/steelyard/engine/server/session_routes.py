"""Requests of clients that are about the clients themselves, and their losses."""

from __future__ import annotations

import asyncio
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
from steelyard.engine.server.http_errors import FORBIDDEN
from steelyard.engine.server.state import ServerState
from steelyard.engine.server.uploaded_loss.validate import read_loss

# What this server can do, and the SDK's own defaults for the rest.
CONFIG = types.ClientConfigResponse(
    custom_loss_server_side=True,
    create_model_via_load_weights=True,
    sample_use_retrieve_futures=True,
    sample_join_sampling_session=True,
)
_DYNAMIC = types.ClientDynamicConfigResponse(sample_cancel_enabled=True)
_LARGEST_GRAPH = 2**20


class Finish(pydantic.BaseModel):
    """How a client ends its session."""

    class Reason(pydantic.BaseModel):
        """Why."""

        type: Literal["success", "errored", "interrupted"]

    reason: Reason
    detail: str | None = None


async def healthz(_: ServerState, __: Request) -> Response:
    """Whether the server is there."""
    return http_bodies.reply(HealthResponse(status="ok"))


async def client_config(desk: ServerState, request: Request) -> Response:
    """What the server can do."""
    await http_bodies.json_of(request, types.ClientConfigRequest, desk.settings.max_body)
    response = http_bodies.reply(CONFIG)
    # The SDK asks for this over a connection that it then leaves open, and forgets.
    response.headers["connection"] = "close"
    return response


async def client_dynamic_config(desk: ServerState, request: Request) -> Response:
    """So too, for what may change."""
    await http_bodies.json_of(request, types.ClientConfigRequest, desk.settings.max_body)
    return http_bodies.reply(_DYNAMIC)


async def get_server_capabilities(desk: ServerState, _: Request) -> Response:
    """The base models on offer."""
    return http_bodies.reply(desk.models.capabilities())


async def create_session(desk: ServerState, request: Request) -> Response:
    """A client comes."""
    asked = await http_bodies.json_of(request, types.CreateSessionRequest, desk.settings.max_body)
    session = desk.sessions.begin(asked.user_metadata, asked.display_name)
    return http_bodies.reply(types.CreateSessionResponse(session_id=session.session_id))


async def session_heartbeat(desk: ServerState, request: Request) -> Response:
    """A client is still there."""
    asked = await http_bodies.json_of(request, SessionHeartbeatRequest, desk.settings.max_body)
    desk.sessions.get(asked.session_id).heartbeats += 1
    return http_bodies.reply(SessionHeartbeatResponse())


async def finish_session(desk: ServerState, request: Request) -> Response:
    """A client goes."""
    await http_bodies.json_of(request, Finish, desk.settings.max_body)
    session_id = request.path_params["session_id"]
    desk.sessions.get(session_id)
    desk.end_session(session_id, "the client has closed its session.")
    return JSONResponse(None)


async def create_custom_loss(desk: ServerState, request: Request) -> Response:
    """A traced loss to keep."""
    asked = await http_bodies.json_of(request, types.CreateCustomLossRequest, _LARGEST_GRAPH)
    session = desk.sessions.get(asked.session_id)
    loss_id = f"{asked.session_id}:loss:{asked.custom_loss_seq_id}"
    ticket = desk.tickets.get(loss_id)
    if ticket is None:
        if len(session.losses) >= desk.settings.max_losses:
            raise HTTPException(
                FORBIDDEN, f"a client may upload at most {desk.settings.max_losses} losses."
            )
        loss = await asyncio.to_thread(read_loss, asked, desk.settings.max_nodes)
        session.losses.setdefault(loss_id, loss)
        ticket = desk.tickets.issue(loss_id, "create_custom_loss", session.session_id)
        ticket.settle(codec.json_answer(types.CreateCustomLossResponse(loss_id=loss_id)))
    return http_bodies.promise(ticket)


async def telemetry(desk: ServerState, request: Request) -> Response:
    """The SDK's reports about itself: they are read and thrown away."""
    await http_bodies.json_of(request, types.TelemetrySendRequest, desk.settings.max_body)
    return http_bodies.reply(TelemetryResponse(status="accepted"))
