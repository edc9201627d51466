"""Forward and backward pass of any training client: log-probs out, d loss / d log-probs in.

A client that can do both around one forward pass has `open_pass`, as `LocalTrainingClient`
does. Any other makes two: `forward` for the log-probs, then `forward_backward` with a loss that
is linear in them and has that gradient.

A policy at the temperature t has the log-probs of softmax(logits / t). The engine and `steelyard
serve` compute them if `loss_fn_config` holds a `"temperature"`. Another server may refuse the key,
or ignore it, and then the log-probs are not those that they are taken for. So a server is asked
first: differences of two log-probs at one position are differences of logits, divided by t.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from steelyard.composition.named_losses import TEMPERATURE
from steelyard.errors import InputError, SpecError

T = TypeVar("T")


class ClientPass(Protocol):
    """A forward pass whose backward pass is still to come.

    Attributes:
        logprobs: of the target tokens, `[T]` or `[T, K]` for each datum.
        given: the extra inputs of terms, by name: `"logits"`, `"hidden_states"`, ….
    """

    logprobs: list[Tensor]
    given: dict[str, Any]

    def backward(
        self,
        gradients: Sequence[Tensor],
        extra_gradients: Mapping[str, Any],
        transform: Callable[[Any], T],
    ) -> Any:
        """Submit the backward pass.

        Args:
            gradients: d loss / d logprobs, shaped like `logprobs`.
            extra_gradients: d loss / d extra inputs, structured like `given`.
            transform: applied to the client's result.

        Returns:
            A future of the transformed result.
        """


class TwoPasses:
    """Two requests, as the SDK's own custom loss makes: `forward`, then `forward_backward`.

    The server computes `cross_entropy` = -Σ logprobsᵢ · weightsᵢ, so d cross_entropy / d logprobsᵢ
    = -weightsᵢ. With weights = -d loss / d logprobs this linear loss has the gradient of the custom
    loss, and by the chain rule so have the model's parameters, although its value is another.

    Args:
        client: the training client.
        data: the batch.
        temperature: of the policy, in both requests.
    """

    def __init__(self, client: Any, data: Sequence[Any], temperature: float = 1.0) -> None:
        self._client, self._config = client, config_at(temperature)
        self._data = list(data)
        if not self._data:
            raise InputError("data must hold at least one Datum, got none.")
        self.logprobs = logprobs_of(submit_forward(client, self._data, self._config).result())
        self.given: dict[str, Any] = {}

    def backward(
        self,
        gradients: Sequence[Tensor],
        extra_gradients: Mapping[str, Any],
        transform: Callable[[Any], T],
    ) -> MappedFuture[T]:
        """Submit the backward pass; see `ClientPass`.

        Raises:
            InputError: there are gradients of anything but log-probs.
        """
        if extra_gradients:
            raise InputError(
                f"the client takes gradients of log-probs alone, got {list(extra_gradients)}."
            )
        request = [
            _linear_loss_datum(datum, weights=-gradient)
            for datum, gradient in zip(self._data, gradients, strict=True)
        ]
        sent = self._client.forward_backward(request, "cross_entropy", *self._config)
        return MappedFuture(sent, transform)


class MappedFuture(Generic[T]):
    """A future of `transform(result)`, where another future gives the result.

    Like the SDK's futures it has `result` for threads and can be awaited in a coroutine.

    Args:
        future: it has `result`, and may have `result_async`.
        transform: called once, however often the result is asked for.
    """

    def __init__(self, future: Any, transform: Callable[[Any], T]) -> None:
        self._future, self._transform = future, transform
        self._cached: list[T] = []  # empty, or the one value: None may be a value
        self._lock = threading.Lock()  # several threads may ask for the result

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value, at most `timeout` seconds.

        Raises:
            TimeoutError: it took longer.
        """
        return self._transformed(self._wait(timeout))

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 - the SDK's
        """Await the value, at most `timeout` seconds."""
        return self._transformed(await self._wait_async(timeout))

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def _wait(self, timeout: float | None) -> Any:
        # A future of one's own may have a `result` without a timeout.
        return self._future.result() if timeout is None else self._future.result(timeout)

    async def _wait_async(self, timeout: float | None) -> Any:  # noqa: ASYNC109 - the SDK's
        if hasattr(self._future, "result_async"):
            return await self._future.result_async(timeout)
        return await asyncio.to_thread(self._wait, timeout)

    def _transformed(self, result: Any) -> T:
        with self._lock:
            if not self._cached:
                self._cached.append(self._transform(result))
            return self._cached[0]


def at_temperature(temperature: float) -> dict[str, float]:
    """The arguments of `open_pass` for a policy at a temperature; none at 1."""
    return {} if temperature == 1 else {TEMPERATURE: temperature}


def config_at(temperature: float) -> tuple[dict[str, float], ...]:
    """The argument `loss_fn_config` for a policy at a temperature; no argument at 1."""
    return () if temperature == 1 else (at_temperature(temperature),)


def is_refusal(error: BaseException) -> bool:
    """Whether the server has rejected the request, rather than that it could not be reached."""
    tinker = sys.modules.get("tinker")
    names = ("RequestFailedError", "BadRequestError", "UnprocessableEntityError")
    kinds = tuple(getattr(tinker, name) for name in names if hasattr(tinker, name))
    return isinstance(error, kinds)


def submit_forward(
    client: Any, data: Sequence[Any], config: tuple[dict[str, float], ...] = ()
) -> Any:
    """Submit a forward pass, with `config_at`; its future has a result for `logprobs_of`.

    Raises:
        InputError: a datum has no target tokens.
    """
    request = [_with_weights(index, datum) for index, datum in enumerate(data)]
    return client.forward(request, "cross_entropy", *config)


def logprobs_of(result: Any) -> list[Tensor]:
    """Log-probs of the target tokens, for each datum."""
    return [_tensor(output["logprobs"]) for output in result.loss_fn_outputs]


def _with_weights(index: int, datum: Any) -> Any:
    """The datum of the first request; `cross_entropy` requires weights, zeros do."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise InputError(
            f"data[{index}].loss_fn_inputs must hold 'target_tokens', "
            f"got {sorted(datum.loss_fn_inputs)}.",
            datum=index,
        )
    weights = datum.loss_fn_inputs.get("weights")
    if weights is None:
        weights = tensor_like(targets, torch.zeros(_tensor(targets).shape))
    return _linear_loss_datum(datum, weights=weights)


def _linear_loss_datum(datum: Any, *, weights: Any) -> Any:
    """The datum with its targets and these weights, and none of its other fields."""
    targets = datum.loss_fn_inputs["target_tokens"]
    return replace(datum, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def tensor_like(data: Any, tensor: Tensor) -> Any:
    """The tensor in the client's own type, that of `data`."""
    kind = type(data)
    if hasattr(kind, "from_torch"):  # the SDK's: no list of numbers in between
        return kind.from_torch(tensor.detach().float().cpu())
    return kind(data=tensor.flatten().tolist(), dtype="float32", shape=list(tensor.shape))


def _tensor(data: Any) -> Tensor:
    tensor: Tensor = data.to_torch()
    return tensor


_ASKED = 2.0  # a temperature at which log-probs differ much from those at 1
_TOLERANCE = 0.05  # of the ratio of the differences: logits may be in bfloat16
_TOKENS = 8  # the first of the vocabulary


def check_temperature(client: Any, temperature: float) -> None:
    """Check that a client computes log-probs at a temperature other than 1.

    A client that runs the model in this process does. Another is asked for the log-probs of a few
    tokens, at two temperatures, in two forward requests.

    Raises:
        SpecError: its server refuses the temperature, or ignores it.
    """
    if temperature == 1 or hasattr(client, "open_pass"):
        return
    plain = _differences(client, 1.0)
    try:
        scaled = _differences(client, _ASKED)
    except Exception as error:
        if not is_refusal(error):
            raise
        raise SpecError(_refused(client, temperature, " ".join(str(error).split()))) from error
    ratio = float((plain @ scaled) / (plain @ plain)) * _ASKED
    if not abs(ratio - 1) < _TOLERANCE:  # NaN too
        raise SpecError(_refused(client, temperature, "it computes the same log-probs with it"))


def _differences(client: Any, temperature: float) -> Tensor:
    """Log-probs of the first tokens at one position, minus their mean: the same of the logits."""
    from tinker import types  # noqa: PLC0415 - a client of a server has the SDK

    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([0]),
            loss_fn_inputs={"target_tokens": types.TensorData.from_torch(torch.tensor([token]))},
        )
        for token in range(_TOKENS)
    ]
    logprobs = logprobs_of(submit_forward(client, data, config_at(temperature)).result())
    values = torch.cat(logprobs).double()
    return values - values.mean()


def _refused(client: Any, temperature: float, reason: str) -> str:
    return (
        f"temperature must be 1 for a client whose server computes log-probs at temperature 1 "
        f"alone, got {temperature!r} for {type(client).__name__}: asked for a temperature in "
        f"loss_fn_config, the server does not divide the logits by it ({reason}). Sample and "
        f"train at temperature 1, or use steelyard.engine or 'steelyard serve'."
    )
