"""Evaluate the terms that are due: inline, offloaded, or fused with others.

This is the one place that decides how a term runs, with `inline_or_offloaded` for where it runs and
`call_events` for what happens when it fails. What terms read, and how they are differentiated, is
up to the `Inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter

from torch import Tensor

from steelyard.composition.aggregate import read_numbers, set_multipliers
from steelyard.composition.call_events import CallEvents, skip
from steelyard.composition.call_seeds import CallSeed
from steelyard.composition.inline_or_offloaded import Job, executor_for, gather, job_for
from steelyard.composition.inputs import Inputs
from steelyard.composition.ranks import Ranks, WholeBatch
from steelyard.composition.settings import Settings
from steelyard.composition.terms import Term, TermResult
from steelyard.errors import GradientError, InputError, TermError
from steelyard.execution.executor import Batch, Ticket
from steelyard.execution.process_lifecycle import ForkGuard
from steelyard.execution.random_state import taken_turn
from steelyard.execution.workers import default_workers
from steelyard.gradients.algebra import check_gradient
from steelyard.gradients.isolated import IsolatedCall, ValueAndGradient
from steelyard.gradients.parse_result import as_scalar, check_finite, is_unmeasured, split_metrics
from steelyard.spec.protocol import Regularizer

_NO_SEED = CallSeed()
# The base losses of the evaluations that are under way.
_active: ContextVar[tuple[Term, ...]] = ContextVar("_active", default=())


class Evaluator:
    """One evaluation of terms on some inputs.

    Args:
        inputs: the inputs of the terms.
        settings: the settings of the pipeline.
        events: emits telemetry; None if no handler is attached.
        stop: a queue in which another thread puts None to cancel the evaluation.
        ranks: the processes that make this call together; None if this one is alone.
        seed: of the random numbers that terms draw.
        part: of the base loss of a step that the base loss of this call is: of a micro-batch whose
            base loss was divided by the tokens of the whole batch, its share of these.
    """

    def __init__(
        self,
        inputs: Inputs,
        settings: Settings,
        events: CallEvents | None = None,
        stop: SimpleQueue[Ticket | None] | None = None,
        ranks: Ranks | None = None,
        seed: CallSeed = _NO_SEED,
        part: float | Tensor = 1.0,
    ) -> None:
        self._inputs, self._settings, self._events = inputs, settings, events
        self._ranks, self._seed, self._part = ranks, seed, part
        self._whole: WholeBatch | None = None
        self._stop, self._check = stop, settings.check_finite

    def evaluate(
        self,
        terms: Sequence[Term],
        step: int,
        *,
        tracked: bool,
        shares: Mapping[str, float] | None = None,
        unmeasured: Container[str] = (),
    ) -> list[TermResult]:
        """Evaluate terms; offloaded ones are started first, then the others run here.

        Args:
            terms: the terms that are due, the base loss first.
            step: the number of the step.
            tracked: whether to compute norms and cosines.
            shares: factors on the weights, by name.
            unmeasured: names of the terms that are known to have nothing to measure in this batch;
                they are not called.

        Raises:
            SpecError: a schedule yields a bad weight at this step.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
            InputError: one of these terms is calling, which would never end.
        """
        # Threads and tasks inherit the context.
        active, base = _active.get(), terms[0]
        if base in active:
            raise InputError(
                "a pipeline must not be computed inside one of its own terms, and it is: use "
                "another pipeline, or call the loss function itself."
            )
        entered = _active.set((*active, base))
        try:
            return self._evaluate(terms, step, tracked, shares or {}, unmeasured)
        finally:
            _active.reset(entered)

    def _evaluate(
        self,
        terms: Sequence[Term],
        step: int,
        tracked: bool,
        shares: Mapping[str, float],
        unmeasured: Container[str],
    ) -> list[TermResult]:
        results = self._begin(terms, step, shares, unmeasured)
        called = [result for result in results if result.measured]
        groups = self._groups(called, tracked=tracked)
        grouped = [result for group in groups for result in group]
        for result in grouped:
            result.executor = "inline"
        self._set_randomness(called, grouped, step)
        shared = self._shared(called) if self._ranks is not None else []
        offloaded = [result for result in called if result.executor != "inline"]
        jobs = self._jobs(offloaded) if offloaded else []
        with ExitStack() as stack:
            inline = [r for r in called if r.executor == "inline" and r not in grouped]
            batch = turn = None
            if any(result.takes_turns for result in inline):
                turn = stack.enter_context(taken_turn())
            if jobs and self._settings.parallel:
                batch = stack.enter_context(self._batch(jobs))
            with turn.inside() if turn is not None else nullcontext():
                for result in inline:
                    self.run_inline(result)
                for group in groups:
                    self._run_together(group, tracked=tracked)
            if jobs:
                batch = batch or stack.enter_context(self._batch(jobs))
                gather(jobs, batch, self._accept, self.fail)
        for result in shared:
            self._receive(result)
        self._whole = None
        self._check_results(results)
        if any(term.is_bounded for term in terms):
            size = self._inputs.gradient_size
            set_multipliers(results, step, size, shares, self._ranks, self._part)
        return results

    def _set_randomness(
        self, results: Sequence[TermResult], grouped: Sequence[TermResult], step: int
    ) -> None:
        for result in results:
            if result not in grouped:  # fused terms draw no random numbers
                result.randomness = self._seed.randomness(result.term, step)

    def _begin(
        self,
        terms: Sequence[Term],
        step: int,
        shares: Mapping[str, float],
        unmeasured: Container[str],
    ) -> list[TermResult]:
        """The results of terms that are still to run."""
        inputs = self._inputs
        spaces = [inputs.space(term) for term in terms]
        in_graph = [inputs.in_graph(term) for term in terms]
        return [
            TermResult(
                term,
                term.weight_at(step) * shares.get(term.name, 1.0),
                "inline" if stays and inputs.inline_by_default else executor_for(term),
                space,
                stays,
                measured=term.name not in unmeasured,
            )
            for term, stays, space in zip(terms, in_graph, spaces, strict=True)
        ]

    def _shared(self, results: Sequence[TermResult]) -> list[TermResult]:
        """Terms that one process evaluates for all, there never inline."""
        shared = [result for result in results if result.term.spec.ranks == "one"]
        if shared and self._ranks is not None:
            self._whole = WholeBatch(self._inputs, self._ranks)
        for result in shared:
            result.executor = "thread" if result.executor == "inline" else result.executor
        return shared

    def _receive(self, result: TermResult) -> None:
        """Take the evaluation of a term from the process that made it."""
        assert self._whole is not None  # noqa: S101 - for mypy: there are such terms
        try:
            evaluation = self._whole.deliver(result)
        except TermError as error:
            skip(result, error, self._events)
        else:
            self._record(result, evaluation)

    def run_inline(self, result: TermResult) -> None:
        """Run a term in this thread, in the autograd graph of the inputs if it belongs there."""
        term, randomness = result.term, result.randomness
        if self._events is not None:
            self._events.term_started(result)
        began = perf_counter()
        try:
            if not result.in_graph:
                call = self._call(result)
                assert call is not None  # noqa: S101 - for mypy: it is not for another process
                self._accept(result, call.run_whole())
            elif randomness is None or not randomness.seeds_global:
                self._run_in_graph(result, began)
            else:
                with randomness.states() as states:
                    self._run_in_graph(result, began)
                term.statistics.draws |= states.drew
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the term raised
            self.fail(result, error)

    def _run_in_graph(self, result: TermResult, began: float) -> None:
        term = result.term
        with ForkGuard(term.name):
            returned = self._inputs.call(term, result.randomness)
        loss, result.custom = split_metrics(term.name, returned)
        if loss is None and term.is_base and isinstance(term.spec.fn, Regularizer):
            loss = self._inputs.zero()
        if is_unmeasured(term.name, loss):
            self._leave_out(result, perf_counter() - began)
            return
        result.value = as_scalar(term.name, loss)
        self._inputs.differentiate(result)
        result.duration = term.statistics.duration = perf_counter() - began
        term.statistics.calls += 1

    def check_gradients(self, results: Sequence[TermResult]) -> None:
        """Fail the terms with a gradient that is not finite.

        Raises:
            TermError: `on_error` of one of them is `"raise"`.
        """
        for result in results:
            try:
                for row in result.gradients.values():
                    check_gradient(result.term.name, row)
            except TermError as error:
                self.fail(result, error)

    def fail(self, result: TermResult, error: BaseException) -> None:
        """Report the failure of a term, and skip the term for this step if `on_error="skip"`.

        Raises:
            TermError: it is the base loss, or its `on_error` is `"raise"`.
        """
        if self._whole is not None and result.term.spec.ranks == "one":
            self._whole.settle(result, error)
        else:
            skip(result, error, self._events)

    def _groups(self, results: Sequence[TermResult], *, tracked: bool) -> list[list[TermResult]]:
        """Groups of at least two terms that can be fused."""
        inputs = self._inputs
        groups: list[list[TermResult]] = []
        if self._settings.aggregator.reads_gram:  # it needs the gradient of each term
            return groups
        for result in results:
            if not inputs.fuse_with(result.term, [], tracked=tracked):
                continue
            for group in groups:
                if inputs.fuse_with(result.term, [r.term for r in group], tracked=tracked):
                    group.append(result)
                    break
            else:
                groups.append([result])
        if tracked:  # the fused kernel gives no cosine with a term outside of the group
            spaces = [result.space for result in results]
            groups = [group for group in groups if spaces.count(group[0].space) == len(group)]
        return [group for group in groups if len(group) > 1]

    def _run_together(self, group: Sequence[TermResult], *, tracked: bool) -> None:
        """Evaluate fused terms; if that fails, one by one, to find the term at fault."""
        if self._events is not None:
            for result in group:
                self._events.term_started(result)
        began, group_result = perf_counter(), None
        # Also a sys.exit() of a term: it is raised again when the terms run one by one.
        with suppress(Exception, SystemExit):
            group_result = self._inputs.compute_together(
                [result.term for result in group],
                [float(result.weight) for result in group],
                tracked=tracked,
            )
        if group_result is not None:
            for result, value in zip(group, group_result.joint.values, strict=True):
                result.value, result.group = value, group_result
            if self._check and not all(map(math.isfinite, read_numbers(group))):
                group_result = None
        if group_result is None:
            for result in group:
                result.value = result.number = result.group = None
                self.run_inline(result)
            return
        share = (perf_counter() - began) / len(group)
        for result in group:
            result.method = "autograd" if group_result.joint.total.requires_grad else None
            result.duration = result.term.statistics.duration = share
            result.gradient_duration = share if group_result.gradients else None

    def _jobs(self, results: Sequence[TermResult]) -> list[Job]:
        settings = self._settings
        executors = (settings.workers or default_workers()).executors
        calls = [self._call(result) for result in results]
        jobs = []
        for result, call in zip(results, calls, strict=True):
            if call is None:
                continue
            executor = executors[result.executor]
            try:
                jobs.append(job_for(result, call, executor, settings.timeout, settings.width))
            except TermError as error:
                self.fail(result, error)
        return jobs

    def _call(self, result: TermResult) -> IsolatedCall | None:
        call: IsolatedCall | None
        if self._whole is not None and result.term.spec.ranks == "one":
            call = self._whole.isolated(result, check_finite=self._check)
        else:
            call = self._inputs.isolated(result.term, check_finite=self._check)
        if call is None or result.randomness is None:
            return call
        remote = result.executor in ("process", "ray")
        records = remote and result.randomness.watched
        return replace(call, randomness=result.randomness, records_changes=records)

    def _batch(self, jobs: Sequence[Job]) -> Batch:
        """Batch of the tickets of all jobs, which run in parallel or one after the other."""
        results = {job.result.term.name: job.result for job in jobs}
        events = self._events
        return Batch(
            [ticket for job in jobs for ticket in job.tickets],
            {job.result.executor: job.executor for job in jobs},
            self._settings.width,
            in_turn=not self._settings.parallel,
            on_start=None
            if events is None
            else lambda ticket: events.term_started(results[ticket.term]),
            events=self._stop,
        )

    def _accept(self, result: TermResult, evaluation: ValueAndGradient) -> None:
        if self._whole is not None and result.term.spec.ranks == "one":
            self._whole.settle(result, evaluation)
            return
        self._record(result, evaluation)
        if result.measured:
            self._inputs.accept(result, evaluation)

    def _leave_out(self, result: TermResult, duration: float) -> None:
        """Leave out a term that returned None; its duration says nothing about other batches."""
        result.measured, result.duration = False, duration
        result.term.warn_if_never_measured()

    def _record(self, result: TermResult, evaluation: ValueAndGradient) -> None:
        result.term.statistics.draws |= evaluation.drew
        if evaluation.changed:
            result.term.warn_lost_state(evaluation.changed)
        if evaluation.value is None:
            self._leave_out(result, evaluation.duration)
            return
        result.number, result.custom = evaluation.value, evaluation.custom
        result.method, result.duration = evaluation.method, evaluation.duration
        if evaluation.method is not None:
            result.gradient_duration = evaluation.gradient_duration
        result.term.statistics.duration = evaluation.duration
        result.term.statistics.calls += 1

    def _check_results(self, results: Sequence[TermResult]) -> None:
        """Fail terms whose value is not finite; warn about terms without a gradient."""
        ran = [result for result in results if result.ran]
        if self._check:
            for result, number in zip(ran, read_numbers(ran), strict=True):
                if not math.isfinite(number):
                    try:
                        check_finite(result.term.name, number)
                    except TermError as error:
                        self.fail(result, error)
        detached = [r for r in results if r.ran and r.method is None]
        source = self._inputs.source if detached else None
        if source is None:
            return
        for result in detached:
            if result.term.spec.gradient == "autograd":
                self.fail(result, _no_path(result.term.name, source))
            elif result.term.spec.gradient == "auto":
                result.term.warn_detached(source)


def _no_path(name: str, source: str) -> GradientError:
    return GradientError(
        f"gradient='autograd' needs a loss that depends on {source} through torch, got one with "
        f"no path to them (regularizer {name!r}): use gradient='score' with one penalty per "
        f"datum, gradient='numerical', or gradient='none' if it is meant so.",
        term=name,
    )
