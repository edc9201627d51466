"""`OnePass`: base and terms in one request, where the server and the terms allow it.

Each graph is uploaded once in a session of the SDK, and refusals are remembered.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from steelyard.clients.blocking import Action, Steps
from steelyard.clients.one_pass.loss_graph import LossGraph
from steelyard.clients.one_pass.lowering import LoweredBatch, Lowering, NotLoweredError
from steelyard.clients.one_pass.results import OnePassFuture, RemoteCall, SentCall, TwoPassCall
from steelyard.clients.one_pass.torch_operations import TRACING
from steelyard.composition.aggregate import WeightedSum
from steelyard.composition.named_losses import TEMPERATURE
from steelyard.composition.pipeline import Pipeline
from steelyard.errors import SpecError

NOT_RUN = "the server does not run uploaded losses"


class RefusedError(Exception):
    """The server, or the SDK, does not take a loss; the message says why."""


class SessionLosses:
    """Losses of one session: handles, and the reasons of refusals, by graph.

    The SDK takes a graph only once in a session, also if the server refused it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[Any, Any] = {}


_SESSIONS: WeakKeyDictionary[Any, SessionLosses] = WeakKeyDictionary()
_SESSIONS_LOCK = threading.Lock()


class Uploader:
    """Uploads losses for a training client; all clients of a session share what is known.

    Args:
        client: the training client.
        service: the service client that made it, whose verb uploading is; None: the losses go
            through the training client, if it is one of the SDK.
    """

    def __init__(self, client: Any, service: Any = None) -> None:
        self._create = getattr(service, "create_custom_loss", None) or _creator(client)
        own = getattr(client, "holder", None)
        self._holder = own if service is None else getattr(service, "holder", None)
        self._elsewhere = None not in (own, self._holder) and own is not self._holder
        with _SESSIONS_LOCK:
            key = self if self._holder is None else self._holder
            self._losses = _SESSIONS.setdefault(key, SessionLosses())

    def why_not(self) -> str | None:
        """Reason for which no loss can be uploaded; None if there is none."""
        if self._create is None:
            return "the client cannot upload losses: pass service=, the client that made it"
        if self._elsewhere:
            return "the service has another session than the client: pass the one that made it"
        config = getattr(self._holder, "get_client_config", None)
        # Where the server does not run losses, the SDK makes two passes and does not say so.
        runs = config is not None and getattr(config(), "custom_loss_server_side", False)
        return None if runs else NOT_RUN

    def upload(self, graph: LossGraph) -> Any:
        """Handle of a loss; it waits for the server the first time.

        Raises:
            RefusedError: the server or the SDK does not take it, now or before.
        """
        with self._losses.lock:
            if graph.key not in self._losses.known:
                try:
                    self._losses.known[graph.key] = self._upload(graph)
                except RefusedError as error:
                    self._losses.known[graph.key] = str(error)
            known = self._losses.known[graph.key]
        if isinstance(known, str):
            raise RefusedError(known)
        return known

    def refuse(self, graph: LossGraph, reason: str) -> None:
        """Remember that the server did not run a loss as it promised."""
        with self._losses.lock:
            self._losses.known[graph.key] = reason

    def _upload(self, graph: LossGraph) -> Any:
        try:
            with TRACING:  # by the SDK, before it sends the loss
                # Present: `why_not` has been asked.
                upload = self._create(graph.function(), dict(graph.ranks))  # type: ignore[misc]
            handle = upload.result()
        except Exception as error:  # the SDK is alpha: whatever it raises, two passes still work
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RefusedError(reason) from error
        if handle.loss_id is None:
            raise RefusedError(NOT_RUN)
        return handle


def _creator(client: Any) -> Callable[..., Any] | None:
    """Upload through a training client of the SDK: the service's verb, in the same session."""
    tinker: Any = sys.modules.get("tinker")  # loaded, if the client is the SDK's
    if not hasattr(tinker, "ServiceClient") or not isinstance(client, tinker.TrainingClient):
        return None
    # A service client opens a session of its own when its holder is first read.
    in_session = {"holder": property(lambda _: client.holder)}
    service = type("SessionService", (tinker.ServiceClient,), in_session)()
    return getattr(service, "create_custom_loss", None)


ServerSide: TypeAlias = Literal["auto", True, False]


class UploadRefusedWarning(UserWarning):
    """The server did not run an uploaded loss as it should; its terms run in two passes."""


@dataclass(frozen=True)
class Explanation:
    """Way in which a call ran, and why.

    Attributes:
        passes: forward passes of the model: 1 or 2; None before the first call.
        reasons: why it took two, by term; `""` for reasons that are of no single term.
    """

    passes: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.passes is None:
            return "no call yet."
        if self.passes == 1:
            return "one pass."
        lines = [f"{name}: {why}" if name else why for name, why in self.reasons.items()]
        return "\n  ".join(["two passes:", *lines])


@dataclass(frozen=True)
class PreparedCall:
    """A call that is ready to be sent.

    Attributes:
        batch: the loss, and the data of the request.
        handle: of the uploaded loss.
        call: the terms.
        step: the number of the step.
    """

    batch: LoweredBatch
    handle: Any
    call: RemoteCall
    step: int


class OnePass:
    """Runs the terms of a client as uploaded losses.

    Args:
        client: the training client.
        service: the service client to upload through; None: the training client.
        server_side: `"auto"` where it is possible, `True` always, `False` never.

    Attributes:
        explanation: of the last call.

    Raises:
        SpecError: `server_side` is none of these.
    """

    def __init__(self, client: Any, service: Any, server_side: ServerSide) -> None:
        if server_side != "auto" and not isinstance(server_side, bool):
            raise SpecError(f"server_side must be 'auto', True or False, got {server_side!r}.")
        self._client, self._server_side = client, server_side
        self._lowering = Lowering()
        self._uploader: Uploader | None = None
        self._service = service
        self._warned = False
        self.explanation = Explanation()

    def submit(
        self,
        pipeline: Pipeline,
        data: Any,
        step: int,
        again: TwoPassCall,
        reason: str | None = None,
        temperature: float = 1.0,
    ) -> Steps[OnePassFuture | None]:
        """Send a call in one request; the steps give None if it has to run in two passes.

        Args:
            pipeline: its terms and settings.
            data: the batch; or a `JoinedData`.
            step: the number of the step.
            again: the same call in two passes, for a request that fails.
            reason: why this call has to run in two passes, whatever its terms.
            temperature: of the policy.

        Raises:
            SpecError: `server_side` is True, and it has to; or a schedule yields a bad weight.
        """
        prepared = yield Action(lambda: self.prepare(pipeline, data, step, reason))
        if prepared is None:
            return None
        client, handle, request = self._client, prepared.handle, list(prepared.batch.data)
        if temperature == 1:
            send = Action(
                lambda: client.forward_backward_custom(request, handle),
                lambda: client.forward_backward_custom_async(request, handle),
            )
        else:
            config = _config_of(handle, temperature)
            send = Action(
                lambda: client.forward_backward(request, "custom", config),
                lambda: client.forward_backward_async(request, "custom", config),
            )
        with _reported(prepared.call):
            sent = yield send
        return self._future(sent, prepared, data, pipeline, again)

    def prepare(
        self, pipeline: Pipeline, data: Any, step: int, reason: str | None = None
    ) -> PreparedCall | None:
        """Lower and upload the terms of a call; None if it has to run in two passes.

        It waits for the server when it has not seen these terms before.

        Raises:
            SpecError: `server_side` is True, and it has to; or a schedule yields a bad weight.
        """
        try:
            prepared = self._prepare(pipeline, data, step, reason)
        except NotLoweredError as error:
            self.explanation = Explanation(2, error.reasons)
            if self._server_side is True:
                raise SpecError(
                    f"server_side=True needs a loss that the server can run in one pass, and "
                    f"{error}: use server_side='auto'."
                ) from error
            return None
        self.explanation = Explanation(1)
        return prepared

    def _prepare(
        self, pipeline: Pipeline, data: Any, step: int, reason: str | None
    ) -> PreparedCall:
        if self._server_side is False:
            raise NotLoweredError({"": "server_side is False"})
        if self._uploader is None:
            self._uploader = Uploader(self._client, self._service)
        reason = reason or self._uploader.why_not()
        if reason is None and not isinstance(pipeline.settings.aggregator, WeightedSum):
            reason = "the aggregator needs this step's gradients before it knows the weights"
        if reason is not None:
            raise NotLoweredError({"": reason})
        call = RemoteCall(pipeline, data, step)
        tracked = pipeline.settings.tracks(step)
        batch = self._lowering.lower(call.terms, call.weights, data, tracked=tracked)
        call.leave_out(batch.unmeasured)
        try:
            return PreparedCall(batch, self._uploader.upload(batch.graph), call, step)
        except RefusedError as error:
            self._warn(str(error))
            raise NotLoweredError({"": f"the server refuses the loss: {error}"}) from error

    def _future(
        self,
        sent: Any,
        prepared: PreparedCall,
        data: Any,
        pipeline: Pipeline,
        again: TwoPassCall,
    ) -> OnePassFuture:
        call = SentCall(
            prepared.batch,
            prepared.call,
            lambda: is_split(self._client, prepared.batch.data),
            again,
            lambda reason: self._refuse(prepared, reason),
            lambda logprobs: pipeline.compute(data, list(logprobs), prepared.step),
            again.optim_steps(),
        )
        return OnePassFuture(sent, call)

    def _refuse(self, prepared: PreparedCall, reason: str) -> None:
        """Run these terms in two passes from now on."""
        if self._uploader is not None:
            self._uploader.refuse(prepared.batch.graph, reason)
        self.explanation = Explanation(2, {"": f"the server refuses the loss: {reason}"})
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Warn of a refusal, once for a client."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the server does not run base and terms as one uploaded loss, and they take two "
                f"passes: {reason}",
                UploadRefusedWarning,
                stacklevel=2,
            )


def _config_of(handle: Any, temperature: float) -> dict[str, float | str]:
    """Config that `forward_backward_custom` sends for an uploaded loss, and the temperature.

    The SDK's method has no argument for it, and its data are those that were lowered for the loss.
    """
    return {"loss_id": handle.loss_id, TEMPERATURE: temperature}


def is_split(client: Any, data: Sequence[Any]) -> bool:
    """Whether the SDK sends a batch in several requests, by the limits that the server gave it."""
    read_config = getattr(getattr(client, "holder", None), "get_client_config", None)
    if read_config is None or len(data) < 2:  # noqa: PLR2004 - one datum is never split
        return False
    limits = read_config()
    size = sum(_size_in_request(datum) for datum in data)
    return bool(
        len(data) > limits.fwdbwd_max_chunk_len or size > limits.fwdbwd_max_chunk_bytes_count
    )


def _size_in_request(datum: Any) -> int:
    """Bytes of a datum as the SDK estimates them; of a sparse tensor more, since it is made dense.

    Tokens are int32, indices int64; an image, the place of one, and audio are sent as they are.
    """
    size = 0
    for tensor in datum.loss_fn_inputs.values():
        indices = (tensor.sparse_crow_indices or (), tensor.sparse_col_indices or ())
        size += tensor.to_numpy().nbytes + 8 * sum(map(len, indices))
    for chunk in datum.model_input.chunks:
        contents = [getattr(chunk, name, None) for name in ("data", "location", "dmel")]
        sent = [len(content) for content in contents if content is not None]
        size += sum(sent) if sent else 4 * chunk.length
    return size


@contextmanager
def _reported(call: RemoteCall) -> Iterator[None]:
    """Emit the start events of a call, and the exception event if it cannot be sent."""
    call.start()
    try:
        yield
    except BaseException as error:
        call.fail(error)
        raise
