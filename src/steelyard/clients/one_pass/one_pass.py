"""`OnePass`: base and terms in one request, where the server and the terms allow it."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from steelyard.clients.one_pass.lowering import LoweredBatch, Lowering, NotLoweredError
from steelyard.clients.one_pass.results import OnePassFuture, SentCall, TwoPassCall
from steelyard.clients.one_pass.upload import RefusedError, Uploader
from steelyard.composition import TEMPERATURE, Pipeline, RemoteCall, WeightedSum
from steelyard.errors import SpecError

ServerSide: TypeAlias = Literal["auto", True, False]


class UploadRefusedWarning(UserWarning):
    """The server did not run an uploaded loss as it should; its terms run in two passes."""


@dataclass(frozen=True)
class Explanation:
    """How a call ran, and why.

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
        data: Sequence[Any],
        step: int,
        again: TwoPassCall,
        reason: str | None = None,
        temperature: float = 1.0,
    ) -> OnePassFuture | None:
        """Send a call in one request; None if it has to run in two passes.

        Args:
            pipeline: its terms and settings.
            data: the batch.
            step: the number of the step.
            again: the same call in two passes, for a request that fails.
            reason: why this call has to run in two passes, whatever its terms.
            temperature: of the policy.

        Raises:
            SpecError: `server_side` is True, and it has to; or a schedule yields a bad weight.
        """
        prepared = self.prepare(pipeline, data, step, reason)
        if prepared is None:
            return None
        request = list(prepared.batch.data)
        with _reported(prepared.call):
            if temperature == 1:
                sent = self._client.forward_backward_custom(request, prepared.handle)
            else:
                config = _config_of(prepared.handle, temperature)
                sent = self._client.forward_backward(request, "custom", config)
        return self._future(sent, prepared, data, pipeline, again)

    async def submit_async(
        self,
        pipeline: Pipeline,
        data: Sequence[Any],
        step: int,
        again: TwoPassCall,
        reason: str | None = None,
        temperature: float = 1.0,
    ) -> OnePassFuture | None:
        """Do the same as `submit`, without blocking the event loop."""
        prepared = await asyncio.to_thread(self.prepare, pipeline, data, step, reason)
        if prepared is None:
            return None
        request = list(prepared.batch.data)
        with _reported(prepared.call):
            if temperature == 1:
                sent = await self._client.forward_backward_custom_async(request, prepared.handle)
            else:
                config = _config_of(prepared.handle, temperature)
                sent = await self._client.forward_backward_async(request, "custom", config)
        return self._future(sent, prepared, data, pipeline, again)

    def prepare(
        self, pipeline: Pipeline, data: Sequence[Any], step: int, reason: str | None = None
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
        self, pipeline: Pipeline, data: Sequence[Any], step: int, reason: str | None
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
        data: Sequence[Any],
        pipeline: Pipeline,
        again: TwoPassCall,
    ) -> OnePassFuture:
        chunks = getattr(self._client, "_chunked_requests_generator", None)
        call = SentCall(
            prepared.batch,
            prepared.call,
            1 if chunks is None else sum(1 for _ in chunks(list(prepared.batch.data))),
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
    """What `forward_backward_custom` sends for an uploaded loss, and the temperature.

    The SDK's method has no argument for it, and its data are those that were lowered for the loss.
    """
    return {"loss_id": handle.loss_id, TEMPERATURE: temperature}


@contextmanager
def _reported(call: RemoteCall) -> Iterator[None]:
    """Emit the start events of a call, and the exception event if it cannot be sent."""
    call.start()
    try:
        yield
    except BaseException as error:
        call.fail(error)
        raise
