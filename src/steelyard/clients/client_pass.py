"""The one idea all training clients share: they give log-probs, and take d loss / d log-probs.

A client that can do both around one forward pass has `open_pass`, as `LocalTrainingClient`
does. Any other is asked twice: `forward` for the log-probs, then `forward_backward` with a loss
that is linear in them and has that gradient.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from steelyard.errors import InputError

T = TypeVar("T")


class ClientPass(Protocol):
    """A forward pass, and the way back through it."""

    logprobs: list[Tensor]
    given: dict[str, Any]

    def backward(
        self, gradients: Sequence[Tensor], beyond: Mapping[str, Any], then: Callable[[Any], T]
    ) -> Any:
        """Submit the backward pass; a future of `then` of what comes back."""


class TwoPasses:
    """The way of the SDK: forward, then backward with weights = -d loss / d logprobs.

    `cross_entropy` is -sum(logprobs * weights), so that is the loss with this gradient.
    """

    def __init__(self, client: Any, data: Sequence[Any]) -> None:
        self._client = client
        self._data = list(data)
        if not self._data:
            raise InputError("data must hold at least one Datum, got none.")
        asked = [_with_weights(index, datum) for index, datum in enumerate(self._data)]
        outputs = client.forward(asked, "cross_entropy").result().loss_fn_outputs
        self.logprobs = [_tensor(output["logprobs"]) for output in outputs]
        self.given: dict[str, Any] = {}

    def backward(
        self, gradients: Sequence[Tensor], beyond: Mapping[str, Any], then: Callable[[Any], T]
    ) -> MappedFuture[T]:
        """Submit the backward pass; a future of `then` of what comes back."""
        if beyond:
            raise InputError(f"the client takes gradients of log-probs alone, got {list(beyond)}.")
        sent = [
            _only(datum, weights=-gradient)
            for datum, gradient in zip(self._data, gradients, strict=True)
        ]
        return MappedFuture(self._client.forward_backward(sent, "cross_entropy"), then)


class MappedFuture(Generic[T]):
    """A future of `then` of what another future gives; to be waited for or awaited, as the SDK's.

    Args:
        future: it has `result`, and may have `result_async`.
        then: called once.
    """

    def __init__(self, future: Any, then: Callable[[Any], T]) -> None:
        self._future, self._then = future, then
        self._made: list[T] = []

    def result(self, timeout: float | None = None) -> T:
        """The value, within `timeout` seconds.

        Raises:
            TimeoutError: it took longer.
        """
        given = self._future.result() if timeout is None else self._future.result(timeout)
        return self._value(given)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - the SDK's
        """As `result`, awaited."""
        if hasattr(self._future, "result_async"):
            return self._value(await self._future.result_async(timeout))
        return await asyncio.to_thread(self.result, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def _value(self, given: Any) -> T:
        if not self._made:
            self._made.append(self._then(given))
        return self._made[0]


def _with_weights(index: int, datum: Any) -> Any:
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise InputError(
            f"data[{index}].loss_fn_inputs must hold 'target_tokens', "
            f"got {sorted(datum.loss_fn_inputs)}."
        )
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None:
        shape = list(_tensor(targets).shape)
        zeros = torch.zeros(shape).flatten().tolist()
        weights = type(targets)(data=zeros, dtype="float32", shape=shape)
    return _only(datum, weights=weights)


def _only(datum: Any, *, weights: Any) -> Any:
    """The datum with its targets and these weights, and none of its other fields."""
    targets = datum.loss_fn_inputs["target_tokens"]
    return replace(datum, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def _tensor(data: Any) -> Tensor:
    tensor: Tensor = data.to_torch()
    return tensor
