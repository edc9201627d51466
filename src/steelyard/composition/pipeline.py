"""`Pipeline`: a base loss and its regularizers over log-probs, called at each training step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Self

import torch

from steelyard import telemetry
from steelyard.composition.aggregate import Combined, build_output, combine
from steelyard.composition.call_events import CALL_EVENTS, CallEvents
from steelyard.composition.call_seeds import CallSeed
from steelyard.composition.evaluate import Evaluator
from steelyard.composition.inputs import LOGPROBS, FlatInputs, ToParameters
from steelyard.composition.term_set import STEP, TermSet, declared_rows
from steelyard.composition.terms import Term
from steelyard.errors import ClosedError, InputError, StateError
from steelyard.execution import Ticket
from steelyard.gradients import LogProbs, Nest
from steelyard.output import CustomLossOutput
from steelyard.spec import (
    BASE,
    ComposedLoss,
    Regularizer,
    RegularizerSpec,
    TermFn,
    did_you_mean,
    is_finite,
    is_whole,
)


class Pipeline(TermSet):
    """Composes loss_total = base_loss + sum(weight * regularizer) and its gradient.

    Args:
        loss_fn: the base loss, `(data, logprobs) -> loss | (loss, metrics)`; may be async. Or a
            sum, as in `base + 0.1 * term`.
        regularizers: specs, or mappings with their fields.
        track_grad_norms: also compute each term's gradient norm and all cosines.
        parallel: let terms that do not run inline overlap; else one after the other.
        timeout: seconds each term may take, unless its spec says otherwise.
        max_concurrency: how many threads, and how many processes, at once; None is one per
            core. Coroutines are not limited.
        check_finite: treat a NaN or infinite value or gradient as a failure of its term.
        workers: the pools that run offloaded terms; None is those that the process shares.
        aggregate: how the terms' gradients become one: `"sum"`, the name of a TorchJD weighting,
            such as `"upgrad"`, a mapping with it as `use` and its options, a weighting as an
            object, or an `Aggregator`.
        track_every: compute norms and cosines at steps that this divides.
        seed: seed of the random numbers that terms draw; None: the one that torch was given, as by
            `torch.manual_seed`. They follow from it, the step, the call within the step, the rank
            and the name of the term, and not from where the term runs.
        gives: names of the extra inputs that `compute` will receive; terms can need only these.
        after: a pipeline whose count of steps, and whose statistics of the terms by name, are
            taken over.

    Raises:
        SpecError: an argument breaks a rule.
        UnpicklableError: a term with `run_in="process"` cannot be pickled.

    Example:
        >>> import torch
        >>> from steelyard import Pipeline, RegularizerSpec
        >>> def nll(data, logprobs):
        ...     return -torch.cat(logprobs).mean(), {"tokens": sum(map(len, logprobs))}
        >>> def l2(data, logprobs):
        ...     return torch.cat(logprobs).square().sum()
        >>> pipeline = Pipeline(nll, [RegularizerSpec(l2, weight=0.1, name="l2")])
        >>> output = pipeline.compute([], [torch.tensor([-1.0, -2.0])])
        >>> output.loss_total, output.regularizers["l2"].contribution
        (2.0, 0.5)
        >>> output.gradients
        [tensor([-0.7000, -0.9000])]
    """

    _closed = False

    def compute(
        self,
        data: Any,
        logprobs: LogProbs,
        step: int | None = None,
        *,
        given: Mapping[str, Nest] | None = None,
        to_parameters: ToParameters | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> CustomLossOutput:
        """Compute the composed loss of one batch, its parts and its gradient.

        It may be called from plain code, inside a running event loop (which it blocks; see
        `acompute`), in a notebook, and from several threads at once.

        Args:
            data: passed to every term unchanged; one item per datum.
            logprobs: a tensor per datum, `[T]` or `[T, K]`, in a list; or one tensor.
            step: the number of this step, from 0; schedules, `every` and bounds follow it. None:
                the one after that of the last call, from 0, so that each call is a step. Give it
                where a call is none: several calls before an optimizer step, or an evaluation,
                for which a second pipeline of `spec.measuring()` leaves this one alone.
            given: the extra inputs, by need: tensors in lists and mappings.
            to_parameters: computes d term / d parameters of each term from its d term / d logprobs
                and d term / d `given`. With it, norms and cosines, and the Gram matrix that an
                aggregator reads, are with respect to the parameters, which `given` must hold.
            shares: factors >= 0 on the weights in this call, by name, `"base"` for the base loss;
                for a call that is one of several before an optimizer step. The output has the
                weights with them, values without, and what `accumulated` reads. {} if all terms
                are sums.

        Raises:
            InputError: the log-probs, the step or the shares break a rule, or a needed extra input
                is missing.
            SpecError: a schedule yields a bad weight at this step.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
            ClosedError: the pipeline is closed.
        """
        step = self.begin_step(step)
        call = self.count_call(step)
        return self._compute(data, logprobs, step, call, given or {}, to_parameters, None, shares)

    async def acompute(
        self,
        data: Any,
        logprobs: LogProbs,
        step: int | None = None,
        *,
        given: Mapping[str, Nest] | None = None,
        to_parameters: ToParameters | None = None,
        shares: Mapping[str, float] | None = None,
    ) -> CustomLossOutput:
        """As `compute`, without blocking the running event loop: the work is done in threads.

        Async terms run on the library's own loop here too. If the caller is cancelled, so is
        the work.
        """
        stop: SimpleQueue[Ticket | None] = SimpleQueue()
        done: Future[None] = Future()
        # As a running future it cannot be cancelled from the loop; the await on it can.
        done.set_running_or_notify_cancel()
        # Counted here, in the order of the calls: their threads may start in another.
        step = self.begin_step(step)
        call = self.count_call(step)
        arguments = (data, logprobs, step, call, given or {}, to_parameters, stop, shares)
        ticket = Ticket(BASE, "thread", self._compute, arguments)
        ticket.on_change = lambda t: done.set_result(None) if t.settled else None
        self.workers.threads.submit(ticket)
        try:
            await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            stop.put(None)
            raise
        result: CustomLossOutput = ticket.result()
        return result

    def state_dict(self) -> dict[str, Any]:
        """State of the stateful terms and of a stateful aggregator, by name, and of the count.

        `"(step)"` is the number of the step of the next call without one.
        """
        return {**super().state_dict(), STEP: self._next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned; one without a count leaves the count alone.

        Raises:
            StateError: its names are not exactly those of the stateful terms, or its count is no
                whole number >= 0.
        """
        if not isinstance(state, Mapping) or STEP not in state:
            super().load_state_dict(state)
            return
        step = state[STEP]
        if not is_whole(step, at_least=0):
            raise StateError(f"{STEP!r} of a state must be a whole number >= 0, got {step!r}.")
        super().load_state_dict({name: own for name, own in state.items() if name != STEP})
        self._next_step = step

    def close(self) -> None:
        """Refuse further calls. Shared workers and workers that were passed in stay open."""
        self._closed = True

    def check_open(self) -> None:
        """Check that it is open.

        Raises:
            ClosedError: it is closed.
        """
        if self._closed:
            raise ClosedError("a pipeline must be open to compute, got a closed one.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compute(
        self,
        data: Any,
        logprobs: LogProbs,
        step: int,
        call: int,
        given: Mapping[str, Nest],
        to_parameters: ToParameters | None,
        stop: SimpleQueue[Ticket | None] | None,
        shares: Mapping[str, float] | None,
    ) -> CustomLossOutput:
        terms, events = self._terms, None
        if telemetry.listening(*CALL_EVENTS):
            tracked = is_whole(step, at_least=0) and self.settings.tracks(step)
            events = CallEvents(self.model_id, data, len(terms), tracked=tracked)
        try:
            # Terms are differentiated, also if the caller is in no_grad or inference mode.
            with torch.inference_mode(mode=False), torch.enable_grad():
                return self._composed(
                    terms, data, logprobs, step, call, given, to_parameters, stop, events, shares
                )
        except BaseException as error:
            if events is not None:
                events.exception(error)
            raise

    def _composed(
        self,
        terms: Sequence[Term],
        data: Any,
        logprobs: LogProbs,
        step: int,
        call: int,
        given: Mapping[str, Nest],
        to_parameters: ToParameters | None,
        stop: SimpleQueue[Ticket | None] | None,
        events: CallEvents | None,
        shares: Mapping[str, float] | None,
    ) -> CustomLossOutput:
        self.check_open()
        if (type(step) is not int and not is_whole(step, at_least=0)) or step < 0:
            raise InputError(f"step must be a whole number >= 0, got {step!r}.")
        if shares:
            _check_shares(shares, [BASE, *(term.name for term in terms)])
        settings = self.settings
        running = [term for term in terms if term.due(step)]
        due = [self._base, *(term.for_data(data, self._gives) for term in running)]
        _check_given(due, given)
        needs = dict.fromkeys(need for term in due for need in term.spec.needs)
        inputs = FlatInputs(data, logprobs, given, needs, to_parameters)
        tracked, aggregator = settings.tracks(step), settings.aggregator
        seed = CallSeed(settings.seed, call)
        evaluator = Evaluator(inputs, settings, self.own_workers, events, stop, seed=seed)
        results = evaluator.evaluate(due, step, tracked=tracked, shares=shares)
        began = perf_counter()
        if to_parameters is not None:
            if settings.check_finite:  # through the model a NaN reaches every parameter
                evaluator.check_gradients(results)
            inputs.add_parameter_gradients(results)
        combine_results = partial(
            combine,
            results,
            aggregator,
            inputs.main_space,
            tracked=tracked,
            step=step,
            declared=declared_rows(terms) if aggregator.reads_gram else (),
        )
        combined = combine_results()
        # A non-finite term makes the total non-finite: one check in the normal case.
        if settings.check_finite and not _is_finite(combined):
            for result in results:
                if result.group is not None:  # fused: the gradient of each term is not known yet
                    result.value = result.number = result.group = None
                    evaluator.run_inline(result)
            evaluator.check_gradients(results)
            combined = combine_results()
        output = build_output(
            results,
            combined,
            [term.name for term in terms if term not in running],
            total_grad_norm=(combined.total_norm or 0.0) if tracked else None,
            grad_space=inputs.main_space,
            **inputs.gradients(combined.totals, results, tracked=tracked),
            parameter_gradients=(
                inputs.gradients_of_model(results) if tracked and shares is not None else None
            ),
        )
        if tracked and to_parameters is None:
            _warn_uncompared(running, due[1:], combined)
        if events is not None:
            events.stop(results, output, began)
        return output


def _warn_uncompared(asked: Sequence[Term], ran: Sequence[Term], combined: Combined) -> None:
    """Report terms that chose extra inputs by their data, and have a norm there."""
    for term, chosen in zip(asked, ran, strict=True):
        if chosen is not term and combined.norms.get(term.name) is not None:
            chosen.warn_uncompared()


def _check_shares(shares: Mapping[str, float], names: Sequence[str]) -> None:
    for name, share in shares.items():
        if name not in names:
            raise InputError(
                f"shares must be by the names of the terms, {', '.join(map(repr, names))}, "
                f"got {name!r}{did_you_mean(str(name), names) or '.'}"
            )
        if not is_finite(share) or share < 0:
            raise InputError(f"shares[{name!r}] must be a finite number >= 0, got {share!r}.")


def _check_given(due: Sequence[Term], given: Mapping[str, Nest]) -> None:
    for term in due:
        if term.spec.needs and not given.keys() >= set(term.spec.needs):
            raise InputError(
                f"given must hold {list(term.spec.needs)} for regularizer {term.name!r}, "
                f"got {sorted(given)}."
            )


def _is_finite(combined: Combined) -> bool:
    extra = (g for key, row in combined.totals.items() if key != LOGPROBS for g in row)
    return math.isfinite(combined.total_norm or 0.0) and all(
        math.isfinite(gradient.sum().item()) for gradient in extra if gradient is not None
    )


def compute(
    data: Any,
    logprobs: LogProbs,
    loss_fn: TermFn | Regularizer | ComposedLoss,
    *,
    regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
    track_grad_norms: bool = False,
    parallel: bool = True,
    timeout: float = 30.0,
    max_concurrency: int | None = None,
    check_finite: bool = True,
    step: int = 0,
) -> CustomLossOutput:
    """Compute the composed loss of one batch; see `Pipeline`, which keeps state across calls.

    Example:
        >>> import torch, steelyard
        >>> logprobs = [torch.tensor([-1.0, -3.0])]
        >>> steelyard.compute([], logprobs, lambda data, lps: -lps[0].sum()).loss_total
        4.0
    """
    pipeline = Pipeline(
        loss_fn,
        regularizers,
        track_grad_norms,
        parallel,
        timeout,
        max_concurrency,
        check_finite,
    )
    return pipeline.compute(data, logprobs, step)


async def acompute(
    data: Any,
    logprobs: LogProbs,
    loss_fn: TermFn | Regularizer | ComposedLoss,
    *,
    regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
    track_grad_norms: bool = False,
    parallel: bool = True,
    timeout: float = 30.0,  # noqa: ASYNC109 - it is each term's, not this coroutine's
    max_concurrency: int | None = None,
    check_finite: bool = True,
    step: int = 0,
) -> CustomLossOutput:
    """As `compute`, without blocking the running event loop."""
    pipeline = Pipeline(
        loss_fn,
        regularizers,
        track_grad_norms,
        parallel,
        timeout,
        max_concurrency,
        check_finite,
    )
    return await pipeline.acompute(data, logprobs, step)
