"""Calls with an uploaded loss: their events, and the output, or the call in two passes."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from steelyard.clients.client_pass import MappedFuture, is_refusal
from steelyard.clients.one_pass.lowering import LoweredBatch
from steelyard.composition.aggregate import Combined, build_output
from steelyard.composition.call_events import CALL_EVENTS, CallEvents
from steelyard.composition.own_data import JoinedData, batch_of
from steelyard.composition.pipeline import Pipeline
from steelyard.composition.terms import LOGPROBS, Term, TermResult
from steelyard.gradients.algebra import norms_and_cosines
from steelyard.gradients.parse_result import check_finite
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.telemetry.bus import listening


class RemoteCall:
    """A call of a pipeline's terms on a server that runs them as one uploaded loss.

    Args:
        pipeline: its terms, weights and settings.
        data: the batch; or a `JoinedData`.
        step: the number of the step.

    Attributes:
        terms: the base loss, and the regularizers that are due, in order.
        weights: of these terms at this step.

    Raises:
        SpecError: a schedule yields a bad weight.
        ClosedError: the pipeline is closed.
    """

    def __init__(self, pipeline: Pipeline, data: Any, step: int) -> None:
        pipeline.check_open()
        self._pipeline, self._data, self._step = pipeline, data, step
        self.terms: Sequence[Term] = pipeline.due(step)
        self.weights = [term.weight_at(step) for term in self.terms]
        names = {term.name for term in self.terms}
        self._not_run = [spec.name for spec in pipeline.specs if spec.name not in names]
        self._events: CallEvents | None = None
        self._began = perf_counter()

    def leave_out(self, names: Collection[str]) -> None:
        """Leave out the terms that have nothing to measure in the batch."""
        if not names:
            return
        pairs = [p for p in zip(self.terms, self.weights, strict=True) if p[0].name not in names]
        self.terms, self.weights = [term for term, _ in pairs], [weight for _, weight in pairs]
        self._not_run += names

    def start(self) -> None:
        """Emit the start events, and count the call."""
        self._began = perf_counter()
        self._pipeline.count_call(self._step)
        if listening(*CALL_EVENTS):
            tracked = self._pipeline.settings.tracks(self._step)
            count, batch = len(self._pipeline.specs), batch_of(self._data)
            self._events = CallEvents(self._pipeline.model_id, batch, count, tracked=tracked)

    def finish(
        self,
        values: Sequence[float],
        metrics: Sequence[Mapping[str, float]],
        products: Sequence[Sequence[float]] | None = None,
        squared_norm: float = 0.0,
        **more: Any,
    ) -> CustomLossOutput:
        """Build the output, and emit the stop events.

        Args:
            values: of the terms.
            metrics: their own metrics.
            products: Gram matrix of their gradients; None if they are not tracked.
            squared_norm: ‖total gradient‖², if they are tracked.
            more: further fields of the output.

        Raises:
            NonFiniteError: a value is not finite, and the pipeline checks that.
        """
        if self._pipeline.settings.check_finite:
            for term, value in zip(self.terms, values, strict=True):
                check_finite(term.name, value)
        rows = zip(self.terms, self.weights, values, metrics, strict=True)
        results = [
            TermResult(
                term,
                weight,
                executor="server",
                space=(LOGPROBS,),
                number=value,
                custom=own,
                method="autograd",
            )
            for term, weight, value, own in rows
        ]
        combined = Combined()
        if products is not None:
            names = [term.name for term in self.terms]
            norm = math.sqrt(squared_norm)
            norms, cosines = norms_and_cosines(names, products)
            compared = {result.term.name: result.compared_with for result in results}
            cosines = {
                pair: value
                for pair, value in cosines.items()
                if len({*map(compared.get, pair)}) == 1
            }
            combined = Combined({}, norm, norms, cosines)
        output = build_output(
            results,
            combined,
            self._not_run,
            total_grad_norm=combined.total_norm,
            data=self._data.data if isinstance(self._data, JoinedData) else self._data,
            **more,
        )
        if self._events is not None:
            for result in results:
                self._events.term_started(result)
            self._events.stop(results, output, self._began)
        self._pipeline.examine(self._step, output, batch_of(self._data))
        return output

    def fail(self, error: BaseException) -> None:
        """Emit the exception event."""
        if self._events is not None:
            self._events.exception(error)


class TermGradients(Mapping[str, list[Tensor]]):
    """d term / d logprobs of each term, before the weight, by name; computed when it is read.

    The server sends inner products of gradients and not the gradients. `output.drivers` needs
    them, and the log-probs are here.

    Args:
        batch: the terms.
        logprobs: of each datum.
    """

    def __init__(self, batch: LoweredBatch, logprobs: Sequence[Tensor]) -> None:
        self._batch, self._logprobs = batch, logprobs
        self._places = {term.name: place for place, term in enumerate(batch.terms)}

    def __getitem__(self, name: str) -> list[Tensor]:
        place = self._places[name]
        term, by = self._batch.terms[place], self._batch.denominators[place]
        gradients = []
        reads = self._batch.inputs.place_of(name)
        for index, row in enumerate(self._logprobs):
            if index not in reads:
                gradients.append(torch.zeros_like(row))
                continue
            mask, fields = self._batch.inputs.of_datum(index, term.inputs)
            with torch.enable_grad():
                leaf = row.detach().requires_grad_()
                _, total = term.sums(leaf, mask, fields)
                (gradient,) = torch.autograd.grad(total / by, leaf)
            gradients.append(gradient)
        return gradients

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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
        is_split: whether the SDK sends it in several requests.
        again: the same call in two passes.
        refuse: called with the reason if these terms shall run in two passes from now on.
        evaluate_here: evaluates the terms for given log-probs.
        steps: the number of optimizer steps when it was sent.
    """

    batch: LoweredBatch
    call: RemoteCall
    is_split: Callable[[], bool]
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
            results = self.batch.results(result.metrics)
            tracked = results.products is not None and logprobs is not None
            output = self.call.finish(
                results.values,
                results.metrics,
                results.products,
                results.squared_norm,
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
        if self.is_split() or self.again.optim_steps() != self.steps:
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
    if len(outputs) != count or not all("logprobs" in output for output in outputs):
        return None
    return [output["logprobs"].to_torch() for output in outputs]
