"""Result of a request with an uploaded loss: the output of the call, or the call in two passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from steelyard.clients.client_pass import MappedFuture, is_refusal
from steelyard.clients.one_pass.lowering import LoweredBatch
from steelyard.clients.one_pass.term_gradients import TermGradients
from steelyard.composition import RemoteCall
from steelyard.output import CustomLossOutput


@dataclass(frozen=True)
class TwoPassCall:
    """The same call in two passes.

    Attributes:
        evaluate: makes the forward pass and evaluates the terms here.
        submit: sends the gradient that `evaluate` has found; gives a future of the output.
        optim_steps: gives the number of optimizer steps so far.
        describe: adds the fields of the client's own result to an output.
    """

    evaluate: Callable[[], Any]
    submit: Callable[[Any], Any]
    optim_steps: Callable[[], int]
    describe: Callable[[CustomLossOutput, Any, Sequence[Tensor] | None], CustomLossOutput]


@dataclass(frozen=True)
class SentCall:
    """A call that was sent in one request.

    Attributes:
        batch: the loss and its inputs.
        call: the terms.
        requests: number of requests that the SDK made of it.
        again: the same call in two passes.
        refuse: called with the reason if these terms shall run in two passes from now on.
        evaluate_here: evaluates the terms for given log-probs.
        steps: the number of optimizer steps when it was sent.
    """

    batch: LoweredBatch
    call: RemoteCall
    requests: int
    again: TwoPassCall
    refuse: Callable[[str], None]
    evaluate_here: Callable[[Sequence[Tensor]], CustomLossOutput]
    steps: int

    def output(self, result: Any) -> CustomLossOutput:
        """Output of the call from the server's result, whose gradient is accumulated by now."""
        logprobs = _logprobs(result.loss_fn_outputs, len(self.batch.data))
        missing = self.batch.missing(result.metrics)
        if missing:
            self.refuse(f"it did not send the metrics {missing}")
            output = self._without_metrics(logprobs)
        else:
            found = self.batch.results(result.metrics)
            tracked = found.products is not None and logprobs is not None
            output = self.call.finish(
                found.values,
                found.metrics,
                found.products,
                found.squared_norm,
                term_gradients=TermGradients(self.batch, logprobs or ()) if tracked else None,
            )
        if logprobs is None:
            self.refuse("it did not send the log-probs of each datum")
        metrics = {k: v for k, v in result.metrics.items() if not k.startswith("custom/")}
        described = self.again.describe(output, replace(result, metrics=metrics), logprobs)
        return replace(described, passes=1)

    def repeat(self, error: BaseException) -> Any:
        """Submit the call in two passes, after its request failed; nothing was accumulated.

        Returns:
            A future of the output.

        Raises:
            TermError: a term fails, which is then the reason.
            BaseException: `error`, if it is too late: an optimizer step is queued behind the
                request, or other requests of the same call may have succeeded.
        """
        self.call.fail(error)
        evaluated = self.again.evaluate()  # raises if a term is not finite, and names it
        self.refuse(" ".join(str(error).split()))
        if self.requests > 1 or self.again.optim_steps() != self.steps:
            error.add_note(
                "The terms are finite in two passes, which later calls will take. This call was "
                "not repeated: an optim_step was queued behind it, or a part of its batch may "
                "have been accumulated."
            )
            raise error
        return self.again.submit(evaluated)

    def _without_metrics(self, logprobs: Sequence[Tensor] | None) -> CustomLossOutput:
        if logprobs is None:
            _, output = self.again.evaluate()
        else:
            output = self.evaluate_here(logprobs)
        return output  # type: ignore[no-any-return]  # an output


class OnePassFuture(MappedFuture[CustomLossOutput]):
    """Future of the output of a call that was sent in one request."""

    def __init__(self, future: Any, sent: SentCall) -> None:
        super().__init__(future, sent.output)
        self._sent = sent
        # A call is repeated once, whoever asks for its result, and however often: a second
        # repetition would accumulate its gradient twice.
        self._repeating = threading.Lock()
        self._repeated: Any = None

    def result(self, timeout: float | None = None) -> CustomLossOutput:
        """Wait for the output, at most `timeout` seconds for the request.

        Raises:
            TimeoutError: it took longer.
            TermError: the request failed because of a term.
        """
        try:
            result = self._wait(timeout)
        except Exception as error:
            if not is_refusal(error):
                raise
            return self._repeat(error)
        return self._transformed(result)

    async def result_async(self, timeout: float | None = None) -> CustomLossOutput:  # noqa: ASYNC109 - the SDK's
        """Await the output, at most `timeout` seconds for the request."""
        try:
            result = await self._wait_async(timeout)
        except Exception as error:
            if not is_refusal(error):
                raise
            return await asyncio.to_thread(self._repeat, error)
        return self._transformed(result)

    def _repeat(self, error: Exception) -> CustomLossOutput:
        with self._repeating:
            if self._repeated is None:
                self._repeated = self._submit_again(error)
        output: CustomLossOutput = self._repeated.result()
        return output

    def _submit_again(self, error: Exception) -> Any:
        try:
            return self._sent.repeat(error)
        except Exception as failure:  # noqa: BLE001 - whatever it is, later calls of `result` raise it too
            failed: Future[CustomLossOutput] = Future()
            failed.set_exception(failure)
            return failed


def _logprobs(outputs: Sequence[Mapping[str, Any]], count: int) -> list[Tensor] | None:
    """Log-probs of each datum, if the server sent them."""
    if len(outputs) != count or not all("logprobs" in each for each in outputs):
        return None
    return [each["logprobs"].to_torch() for each in outputs]
