"""`Pipeline`: a base loss and its regularizers over log-probs, called at each training step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Self, TypedDict, Unpack

from steelyard.composition.aggregate import Combined, build_output, combine
from steelyard.composition.call_events import CALL_EVENTS, CallEvents
from steelyard.composition.call_seeds import CallSeed
from steelyard.composition.evaluate import Evaluator
from steelyard.composition.inputs import FlatInputs, ParameterGradients
from steelyard.composition.own_data import JoinedData, batch_of, check_joined, data_of
from steelyard.composition.settings import Settings
from steelyard.composition.term_set import STEP, TermSet, declared_rows
from steelyard.composition.terms import LOGPROBS, Term
from steelyard.composition.weightings import AggregatorLike
from steelyard.errors import ClosedError, InputError, StateError
from steelyard.execution.executor import Ticket
from steelyard.execution.workers import Workers
from steelyard.gradients.layout import LogProbs, Nest, gradients_enabled
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.checks import is_finite, is_whole
from steelyard.spec.error_messages import BASE, did_you_mean
from steelyard.spec.protocol import Regularizer, TermFn
from steelyard.spec.regularizer import ComposedLoss, RegularizerSpec
from steelyard.telemetry.bus import listening


@dataclass(frozen=True)
class _Call:
    """One call of a pipeline: what `Pipeline.compute` was given, and its place in the training.

    Attributes:
        terms: the regularizers of the pipeline when the call began.
        step: the number of the step; it may break its rule.
        number: how many calls of this step there were before.
        data: passed to the terms; or a `JoinedData`.
        logprobs: of the data.
        given: the extra inputs, by need.
        parameter_gradients: see `Pipeline.compute`; also `share`.
        share: see `Pipeline.compute`.
        stop: a queue in which another thread puts None to cancel the call.
    """

    terms: Sequence[Term]
    step: int
    number: int
    data: Any
    logprobs: LogProbs
    given: Mapping[str, Nest]
    parameter_gradients: ParameterGradients | None
    share: Mapping[str, float] | None
    stop: SimpleQueue[Ticket | None] | None = None

    def check_share(self) -> None:
        """Check the share of each term.

        Raises:
            InputError: there is no term of a name, or a share is no finite number >= 0.
        """
        if not self.share:
            return
        names = [BASE, *(term.name for term in self.terms)]
        for name, share in self.share.items():
            if name not in names:
                raise InputError(
                    f"share must be by the names of the terms, {', '.join(map(repr, names))}, "
                    f"got {name!r}{did_you_mean(str(name), names) or '.'}"
                )
            if not is_finite(share) or share < 0:
                raise InputError(f"share[{name!r}] must be a finite number >= 0, got {share!r}.")

    def inputs(self, due: Sequence[Term]) -> FlatInputs:
        """Return the inputs of the terms that are due.

        Raises:
            InputError: an extra input that one of them needs is missing, or data of its own.
        """
        check_joined([term.spec for term in due], self.data)
        needs: dict[str, None] = {}
        for term in due:
            if not term.spec.needs:
                continue
            if not self.given.keys() >= set(term.spec.needs):
                raise InputError(
                    f"given must hold {list(term.spec.needs)} for regularizer {term.name!r}, "
                    f"got {sorted(self.given)}."
                )
            needs |= dict.fromkeys(term.spec.needs)
        return FlatInputs(self.data, self.logprobs, self.given, needs, self.parameter_gradients)


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

    def __init__(
        self,
        loss_fn: TermFn | Regularizer | ComposedLoss,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
        track_grad_norms: bool = False,
        parallel: bool = True,
        timeout: float = 30.0,
        max_concurrency: int | None = None,
        check_finite: bool = True,
        workers: Workers | None = None,
        aggregate: AggregatorLike = "sum",
        *,
        track_every: int = 1,
        seed: int | None = None,
        gives: Collection[str] = (),
        after: TermSet | None = None,
    ) -> None:
        settings = Settings(
            track_grad_norms,
            parallel,
            timeout,
            max_concurrency,
            check_finite,
            workers,
            aggregate,
            track_every,
            seed,
        )
        super().__init__(loss_fn, regularizers, settings, gives=gives, after=after)

    @classmethod
    def of(
        cls,
        loss_fn: TermFn | Regularizer | ComposedLoss,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]],
        settings: Settings,
        *,
        gives: Collection[str] = (),
        after: TermSet | None = None,
    ) -> Self:
        """Build a pipeline with settings that have been validated."""
        pipeline = cls.__new__(cls)
        TermSet.__init__(pipeline, loss_fn, regularizers, settings, gives=gives, after=after)
        return pipeline

    def compute(
        self,
        data: Any,
        logprobs: LogProbs,
        step: int | None = None,
        *,
        given: Mapping[str, Nest] | None = None,
        parameter_gradients: ParameterGradients | None = None,
        share: Mapping[str, float] | None = None,
    ) -> CustomLossOutput:
        """Compute the composed loss of one batch, its parts and its gradient.

        It may be called from plain code, inside a running event loop (which it blocks; see
        `acompute`), in a notebook, and from several threads at once.

        Args:
            data: passed to every term unchanged; one item per datum. If terms have data of their
                own, what `join` gives for them: the log-probs and extra inputs are then those of
                all `joined.data`, and so are the gradients.
            logprobs: a tensor per datum, `[T]` or `[T, K]`, in a list; or one tensor.
            step: the number of this step, from 0; schedules, `every` and bounds follow it. None:
                the one after that of the last call, from 0, so that each call is a step. Give it
                where a call is none: several calls before an optimizer step, or an evaluation,
                for which a second pipeline of `spec.measuring()` leaves this one alone.
            given: the extra inputs, by need: tensors in lists and mappings.
            parameter_gradients: computes d term / d parameters of each term from its
                d term / d logprobs and d term / d `given`. With it, norms and cosines, and the Gram
                matrix that an aggregator reads, are with respect to the parameters, which `given`
                must hold.
            share: the part of the optimizer step's batch that this call has, if the step has
                several calls: for each term by name, `"base"` for the base loss, a factor >= 0 on
                its weight. The output has the weights with it, values without, and what
                `accumulated` reads. {} if all terms are sums.

        Raises:
            InputError: the log-probs, the step or the share break a rule, or a needed extra input
                is missing.
            SpecError: a schedule yields a bad weight at this step.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
            ClosedError: the pipeline is closed.
        """
        at = self._count(step)
        given = given or {}
        call = _Call(self._terms, *at, data, logprobs, given, parameter_gradients, share)
        return self._compute(call)

    async def acompute(
        self,
        data: Any,
        logprobs: LogProbs,
        step: int | None = None,
        *,
        given: Mapping[str, Nest] | None = None,
        parameter_gradients: ParameterGradients | None = None,
        share: Mapping[str, float] | None = None,
    ) -> CustomLossOutput:
        """As `compute`, without blocking the running event loop: the work is done in threads.

        Async terms run on the library's own loop here too. If the caller is cancelled, so is
        the work.
        """
        done: Future[None] = Future()
        # As a running future it cannot be cancelled from the loop; the await on it can.
        done.set_running_or_notify_cancel()
        stop: SimpleQueue[Ticket | None] = SimpleQueue()
        # Counted here, in the order of the calls: their threads may start in another.
        at = self._count(step)
        given = given or {}
        call = _Call(self._terms, *at, data, logprobs, given, parameter_gradients, share, stop)
        ticket = Ticket(BASE, "thread", self._compute, (call,))
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

    def _count(self, step: int | None) -> tuple[int, int]:
        """Count a call that begins; returns its step, and the number of the step's calls before."""
        step = self.begin_step(step)
        return step, self.count_call(step)

    def _compute(self, call: _Call) -> CustomLossOutput:
        events = None
        if listening(*CALL_EVENTS):
            tracked = is_whole(call.step, at_least=0) and self.settings.tracks(call.step)
            batch = batch_of(call.data)
            events = CallEvents(self.model_id, batch, len(call.terms), tracked=tracked)
        try:
            # Terms are differentiated, also if the caller is in no_grad or inference mode.
            with gradients_enabled():
                return self._composed(call, events)
        except BaseException as error:
            if events is not None:
                events.exception(error)
            raise

    def _composed(self, call: _Call, events: CallEvents | None) -> CustomLossOutput:
        self.check_open()
        settings, step = self.settings, call.step
        if (type(step) is not int and not is_whole(step, at_least=0)) or step < 0:
            raise InputError(f"step must be a whole number >= 0, got {step!r}.")
        call.check_share()
        running = [term for term in call.terms if term.due(step)]
        read = [term.for_data(data_of(call.data, term.name), self._gives) for term in running]
        due = [self._base, *read]
        inputs = call.inputs(due)
        tracked, aggregator = settings.tracks(step), settings.aggregator
        seed = CallSeed(settings.seed, call.number)
        evaluator = Evaluator(inputs, settings, events, call.stop, seed=seed)
        results = evaluator.evaluate(due, step, tracked=tracked, shares=call.share)
        began = perf_counter()
        if call.parameter_gradients is not None:
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
            declared=declared_rows(call.terms) if aggregator.reads_gram else (),
        )
        combined = combine_results()
        # A non-finite term makes the total non-finite: one check in the normal case.
        if settings.check_finite and not _is_finite(combined):
            # Which term it is shows in the terms' own gradients. A fused group has one gradient, of
            # all its terms together, so these are evaluated again, one by one.
            for result in results:
                if result.group is not None:
                    result.value = result.number = result.group = None
                    evaluator.run_inline(result)
            evaluator.check_gradients(results)
            combined = combine_results()
        output = build_output(
            results,
            combined,
            [term.name for term in call.terms if term not in running],
            total_grad_norm=(combined.total_norm or 0.0) if tracked else None,
            grad_space=inputs.main_space,
            data=call.data.data if isinstance(call.data, JoinedData) else call.data,
            **inputs.gradients(combined.totals, results, tracked=tracked),
            parameter_gradients=(
                inputs.gradients_of_model(results) if tracked and call.share is not None else None
            ),
        )
        if tracked and call.parameter_gradients is None:
            _warn_uncompared(running, due[1:], combined)
        if events is not None:
            events.stop(results, output, began)
        self.examine(step, output, batch_of(call.data))
        return output


def _warn_uncompared(asked: Sequence[Term], ran: Sequence[Term], combined: Combined) -> None:
    """Report terms that chose extra inputs by their data, and have a norm there."""
    for term, chosen in zip(asked, ran, strict=True):
        # Data of its own are compared with those of no other term in any case.
        if chosen is not term and term.spec.data is None and term.name in combined.norms:
            chosen.warn_uncompared()


def _is_finite(combined: Combined) -> bool:
    extra = (g for key, row in combined.totals.items() if key != LOGPROBS for g in row)
    return math.isfinite(combined.total_norm or 0.0) and all(
        math.isfinite(gradient.sum().item()) for gradient in extra if gradient is not None
    )


class ComputeSettings(TypedDict, total=False):
    """Settings that `compute` and `acompute` take; `Pipeline` explains them and has more."""

    track_grad_norms: bool
    parallel: bool
    timeout: float
    max_concurrency: int | None
    check_finite: bool


def compute(
    data: Any,
    logprobs: LogProbs,
    loss_fn: TermFn | Regularizer | ComposedLoss,
    *,
    regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
    step: int = 0,
    **settings: Unpack[ComputeSettings],
) -> CustomLossOutput:
    """Compute the composed loss of one batch; see `Pipeline`, which keeps state across calls.

    Args:
        data: passed to every term unchanged; one item per datum.
        logprobs: a tensor per datum, `[T]` or `[T, K]`, in a list; or one tensor.
        loss_fn: the base loss.
        regularizers: specs, or mappings with their fields.
        step: the number of this step, from 0.
        settings: `track_grad_norms`, `parallel`, `timeout`, `max_concurrency` and `check_finite`,
            as of a `Pipeline`.

    Example:
        >>> import torch, steelyard
        >>> logprobs = [torch.tensor([-1.0, -3.0])]
        >>> steelyard.compute([], logprobs, lambda data, lps: -lps[0].sum()).loss_total
        4.0
    """
    return Pipeline(loss_fn, regularizers, **settings).compute(data, logprobs, step)


async def acompute(
    data: Any,
    logprobs: LogProbs,
    loss_fn: TermFn | Regularizer | ComposedLoss,
    *,
    regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
    step: int = 0,
    **settings: Unpack[ComputeSettings],
) -> CustomLossOutput:
    """As `compute`, without blocking the running event loop."""
    return await Pipeline(loss_fn, regularizers, **settings).acompute(data, logprobs, step)
