"""`Pipeline`: a base loss and its regularizers, ready to be called step after step."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Self

import torch

from steelyard.composition.call import Call, Settings
from steelyard.composition.events import CallEvents
from steelyard.composition.join import join
from steelyard.composition.part import Part
from steelyard.composition.term import Facts, Term
from steelyard.errors import ClosedError, InputError, SpecError, StateError
from steelyard.execution import Ticket, Workers, check_picklable, default_workers
from steelyard.gradients import LogProbs, Nest, flatten
from steelyard.output import CustomLossOutput
from steelyard.spec import (
    BASE,
    Regularizer,
    RegularizerSpec,
    Schedule,
    TermFn,
    check_timeout,
)
from steelyard.spec.callables import is_async
from steelyard.spec.numbers import is_whole

MAX_REGULARIZERS = 100


class Pipeline:
    """Composes loss_total = base_loss + sum(weight * regularizer) and its gradient.

    Args:
        loss_fn: the base loss, `(data, logprobs) -> loss | (loss, metrics)`; may be async.
        regularizers: specs, or mappings with their fields.
        track_grad_norms: also compute each term's gradient norm and all cosines.
        parallel: let terms that do not run inline overlap; else one after the other.
        timeout: seconds each term may take, unless its spec says otherwise.
        max_concurrency: how many threads, and how many processes, at once; None is one per
            core. Coroutines are not limited.
        check_finite: treat a NaN or infinite value or gradient as a failure of its term.
        workers: what terms run on; None is what all pipelines of the process share.
        gives: what `compute` will be given beyond log-probs; a term may need no more.
        after: a pipeline to go on from: what it has learned of its terms, by name, goes along.

    Raises:
        SpecError: an argument breaks a rule.
        UnpicklableError: a term that is to run in a process cannot travel there.

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

    def __init__(
        self,
        loss_fn: TermFn | Regularizer,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
        track_grad_norms: bool = False,
        parallel: bool = True,
        timeout: float = 30.0,
        max_concurrency: int | None = None,
        check_finite: bool = True,
        workers: Workers | None = None,
        *,
        gives: Collection[str] = (),
        after: Pipeline | None = None,
    ) -> None:
        width = (os.cpu_count() or 1) if max_concurrency is None else max_concurrency
        if not is_whole(width, at_least=1):
            raise SpecError(
                f"max_concurrency must be a whole number >= 1 or None, got {max_concurrency!r}."
            )
        self._settings = Settings(
            track_grad_norms=track_grad_norms,
            parallel=parallel,
            timeout=check_timeout(timeout, "the pipeline"),
            width=width,
            check_finite=check_finite,
        )
        self.model_id: str | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._own_workers = workers
        self._gives = frozenset(gives)
        self._facts: dict[str, Facts] = {} if after is None else after._facts  # noqa: SLF001
        self._base = self._term(_base_spec(loss_fn))
        self._terms: tuple[Term, ...] = ()
        self._replace_terms([self._term(RegularizerSpec.of(spec)) for spec in regularizers])

    @property
    def specs(self) -> tuple[RegularizerSpec, ...]:
        """The specs of the regularizers, in order."""
        return tuple(term.spec for term in self._terms)

    @property
    def settings(self) -> Settings:
        """How the terms run."""
        return self._settings

    @property
    def workers(self) -> Workers:
        """What the terms run on."""
        return self._own_workers or default_workers()

    def due(self, step: int = 0) -> tuple[Term, ...]:
        """The base loss and the regularizers that run at `step`, in order."""
        return (self._base, *(term for term in self._terms if term.spec.due(step)))

    def needs(self, step: int = 0) -> tuple[str, ...]:
        """What the regularizers that are due at `step` need beyond log-probs."""
        return tuple(dict.fromkeys(need for term in self.due(step) for need in term.spec.needs))

    def compute(
        self,
        data: Any,
        logprobs: LogProbs,
        step: int = 0,
        *,
        given: Mapping[str, Nest] | None = None,
    ) -> CustomLossOutput:
        """The composed loss of one batch, its parts and its gradient.

        It may be called from plain code, inside a running event loop (which it blocks; see
        `acompute`), in a notebook, and from several threads at once.

        Args:
            data: handed to every term as it is; one item per datum.
            logprobs: a tensor per datum, `[T]` or `[T, K]`, in a list; or one tensor.
            step: the number of this step, from 0; schedules and `every` follow it.
            given: what there is beyond log-probs, by need: tensors in lists and mappings.

        Raises:
            InputError: the log-probs or the step break a rule, or something needed is not given.
            SpecError: a schedule yields a bad weight at this step.
            TermError: the base loss failed, or a term whose `on_error` is `"raise"`.
            ClosedError: the pipeline is closed.
        """
        return self._compute(data, logprobs, step, given or {}, SimpleQueue())

    async def acompute(
        self,
        data: Any,
        logprobs: LogProbs,
        step: int = 0,
        *,
        given: Mapping[str, Nest] | None = None,
    ) -> CustomLossOutput:
        """As `compute`, without blocking the running event loop: the work is done in threads.

        Async terms run on the library's own loop here too. If the caller is cancelled, so is
        the work.
        """
        stop: SimpleQueue[Ticket | None] = SimpleQueue()
        done: Future[None] = Future()
        # A running future cannot be cancelled by the loop; whoever waits for it can be.
        done.set_running_or_notify_cancel()
        ticket = Ticket(BASE, "thread", self._compute, (data, logprobs, step, given or {}, stop))
        ticket.on_change = lambda t: done.set_result(None) if t.settled else None
        self.workers.threads.submit(ticket)
        try:
            await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            stop.put(None)
            raise
        result: CustomLossOutput = ticket.result()
        return result

    def add(self, spec: RegularizerSpec | Mapping[str, Any]) -> None:
        """Put one more regularizer at the end, from the next call on.

        Raises:
            SpecError: it breaks a rule, its name is taken, or there are 100 already.
        """
        with self._lock:
            self._replace_terms([*self._terms, self._term(RegularizerSpec.of(spec))])

    def remove(self, name: str) -> None:
        """Take a regularizer off, from the next call on.

        Raises:
            SpecError: there is none of that name.
        """
        with self._lock:
            gone = self._find(name)
            self._terms = tuple(term for term in self._terms if term is not gone)

    def set_weight(self, name: str, weight: float | Schedule) -> None:
        """Change a weight, from the next call on.

        Raises:
            SpecError: there is no such regularizer, or the weight breaks a rule.
        """
        self._change(name, weight=weight)

    def set_enabled(self, name: str, enabled: bool) -> None:
        """Switch a regularizer on or off, from the next call on.

        Raises:
            SpecError: there is no such regularizer, or `enabled` is not a bool.
        """
        self._change(name, enabled=enabled)

    def state_dict(self) -> dict[str, Any]:
        """What the base loss and the regularizers remember from batch to batch, by name."""
        return {name: fn.state_dict() for name, fn in self._stateful().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            StateError: it does not hold a state for exactly the stateful terms there are.
        """
        stateful = self._stateful()
        if set(state) != set(stateful):
            raise StateError(
                f"state must hold exactly the stateful terms {sorted(stateful)}, "
                f"got {sorted(state)}."
            )
        for name, fn in stateful.items():
            fn.load_state_dict(state[name])

    def close(self) -> None:
        """Refuse further calls. Workers that pipelines share, or that were passed in, live on."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy has a lock of its own, and runs on the workers of the process it lives in.
        return {**self.__dict__, "_lock": None, "_own_workers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _compute(
        self,
        data: Any,
        logprobs: LogProbs,
        step: int,
        given: Mapping[str, Nest],
        stop: SimpleQueue[Ticket | None],
    ) -> CustomLossOutput:
        terms = self._terms
        events = CallEvents(
            {
                "model_id": self.model_id,
                "data_count": _count(data),
                "regularizer_count": len(terms),
                "track_grad_norms": self._settings.track_grad_norms,
            }
        )
        try:
            output = self._composed(terms, data, logprobs, step, given, stop, events)
        except BaseException as error:
            events.exception(error)
            raise
        events.stop(output)
        return output

    def _composed(
        self,
        terms: tuple[Term, ...],
        data: Any,
        logprobs: LogProbs,
        step: int,
        given: Mapping[str, Nest],
        stop: SimpleQueue[Ticket | None],
        events: CallEvents,
    ) -> CustomLossOutput:
        if self._closed:
            raise ClosedError("a pipeline must be open to compute, got a closed one.")
        if not is_whole(step, at_least=0):
            raise InputError(f"step must be a whole number >= 0, got {step!r}.")
        with torch.inference_mode(mode=False):
            layout, flat = flatten(logprobs)
        due = [self._base, *(term for term in terms if term.spec.due(step))]
        for term in due:
            if not given.keys() >= set(term.spec.needs):
                raise InputError(
                    f"given must hold {list(term.spec.needs)} for regularizer {term.name!r}, "
                    f"got {sorted(given)}."
                )
        finite = self._settings.check_finite
        parts = [
            Part.of(term, step, data, layout, flat, given, check_finite=finite) for term in due
        ]
        call = Call(parts, self._settings)
        call.run(self.workers, stop)
        call.combine()
        began = perf_counter()
        not_run = [term.name for term in terms if not term.spec.due(step)]
        tracked = self._settings.track_grad_norms
        output = join(call, layout, given, not_run, tracked=tracked)
        events.composed(began, output)
        return output

    def _term(self, spec: RegularizerSpec) -> Term:
        return Term(spec, self._facts.setdefault(spec.name, Facts()))

    def _stateful(self) -> dict[str, Any]:
        terms = (self._base, *self._terms)
        return {term.name: term.spec.stateful for term in terms if term.spec.stateful is not None}

    def _change(self, name: str, **fields: Any) -> None:
        with self._lock:
            old = self._find(name)
            new = replace(old, spec=replace(old.spec, **fields))
            self._terms = tuple(new if term is old else term for term in self._terms)

    def _find(self, name: str) -> Term:
        for term in self._terms:
            if term.name == name:
                return term
        known = [term.name for term in self._terms]
        raise SpecError(f"name must be that of a regularizer here, one of {known}, got {name!r}.")

    def _replace_terms(self, terms: list[Term]) -> None:
        if len(terms) > MAX_REGULARIZERS:
            raise SpecError(
                f"a pipeline takes at most {MAX_REGULARIZERS} regularizers, got {len(terms)}."
            )
        names = {BASE}
        for term in terms:
            if term.name in names:
                why = "is the base loss" if term.name == BASE else "stands twice"
                raise SpecError(f"names must be unique, and {term.name!r} {why}: choose another.")
            names.add(term.name)
            missing = [need for need in term.spec.needs if need not in self._gives]
            if missing:
                raise SpecError(
                    f"needs must be among what the training client gives, log-probs"
                    f"{''.join(f', {need}' for need in sorted(self._gives))}, and {missing} "
                    f"is not: train on steelyard.engine, which has it, or rewrite the term "
                    f"(regularizer {term.name!r})."
                )
        unproved = [
            term
            for term in terms
            if term.spec.run_in == "process" and term.facts.travelled is not term.spec.fn
        ]
        for term in unproved:
            check_picklable(term.name, (term.spec.call, term.spec.options))
            term.facts.travelled = term.spec.fn
        if unproved:
            self.workers.processes.warm()
        self._terms = tuple(terms)


def _base_spec(loss_fn: Any) -> RegularizerSpec:
    if loss_fn is None or not (callable(loss_fn) or hasattr(loss_fn, "compute")):
        raise SpecError(
            f"loss_fn must be the base loss, callable as (data, logprobs), got {loss_fn!r}."
        )
    place = "async" if is_async(loss_fn) else "inline"
    return RegularizerSpec(loss_fn, 1.0, BASE, run_in=place)  # type: ignore[arg-type]  # both are


def _count(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None
