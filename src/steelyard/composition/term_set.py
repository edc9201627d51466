"""The base loss and the regularizers of a composition; they can be changed between steps."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from steelyard.composition.bounds import BoundedState
from steelyard.composition.call_seeds import CallCounter, CallSeed
from steelyard.composition.findings import FindingWarnings
from steelyard.composition.own_data import JoinedData, data_of
from steelyard.composition.ranks import Ranks, mean_state
from steelyard.composition.settings import Settings
from steelyard.composition.terms import CallStatistics, Term
from steelyard.errors import SpecError, StateError
from steelyard.execution.workers import Workers, default_workers
from steelyard.output.custom_loss import CustomLossOutput
from steelyard.spec.checks import is_whole
from steelyard.spec.error_messages import BASE
from steelyard.spec.protocol import Regularizer, Schedule, Stateful, TermFn, is_async
from steelyard.spec.regularizer import ComposedLoss, RegularizerSpec, split_loss

MAX_REGULARIZERS = 100
# Names of the states of the aggregator and of the count of steps, beside the names of the terms.
_AGGREGATE, STEP = "(aggregate)", "(step)"
_RESERVED = {
    BASE: "is the base loss",
    _AGGREGATE: "is the aggregator",
    STEP: "is the number of the step",
}


class TermSet:
    """A base loss, its regularizers, and how they run.

    Args:
        loss_fn: the base loss; see `Pipeline`.
        regularizers: specs, or mappings with their fields.
        settings: of the evaluation.
        gives: names of the extra inputs that the terms may need.
        after: a set whose count of steps, and whose statistics of the terms by name, are taken
            over.

    Attributes:
        settings: of the evaluation.
        model_id: the model of a training client, for telemetry; None elsewhere.
    """

    def __init__(
        self,
        loss_fn: TermFn | Regularizer | ComposedLoss,
        regularizers: Iterable[RegularizerSpec | Mapping[str, Any]],
        settings: Settings,
        *,
        gives: Collection[str] = (),
        after: TermSet | None = None,
    ) -> None:
        self.settings = settings
        self.model_id: str | None = None
        self._lock = threading.Lock()
        self._gives = frozenset(gives)
        self._statistics: dict[str, CallStatistics] = {} if after is None else after._statistics  # noqa: SLF001
        self._next_step: int = 0 if after is None else after._next_step  # noqa: SLF001
        self._warnings: FindingWarnings = (
            FindingWarnings() if after is None else after._warnings  # noqa: SLF001
        )
        self._calls: CallCounter = CallCounter() if after is None else after._calls  # noqa: SLF001
        loss_fn, regularizers = split_loss(loss_fn, regularizers)
        self._base = self._term(_base_spec(loss_fn))
        self._terms: tuple[Term, ...] = ()
        self._replace_terms([self._term(RegularizerSpec.of(spec)) for spec in regularizers])

    @property
    def loss_fn(self) -> TermFn | Regularizer:
        """The base loss, as it was given."""
        fn: TermFn | Regularizer = self._base.spec.fn
        return fn

    @property
    def specs(self) -> tuple[RegularizerSpec, ...]:
        """The specs of the regularizers, in order."""
        return tuple(term.spec for term in self._terms)

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the terms that an aggregator may compare: the base loss, and no anchors."""
        return declared_rows(self._terms)

    @property
    def workers(self) -> Workers:
        """The pools that run offloaded terms."""
        return self.settings.workers or default_workers()

    def due(self, step: int = 0, data: Any = None) -> tuple[Term, ...]:
        """The base loss and the regularizers that run at `step`, in order.

        With `data` each has the extra inputs that it reads with them.
        """
        due = (term for term in self._terms if term.due(step))
        return (self._base, *(term.for_data(data_of(data, term.name), self._gives) for term in due))

    def join(self, data: Any, step: int | None = None) -> Any:
        """The data of a call: `data`, and behind them the data that its terms have of their own.

        Run the model on the `data` of what this returns, and pass it to the call with their
        log-probs. The same step again, before its optimizer step, has other data.

        Args:
            data: the batch.
            step: the number of the step; None: that of the next call without one.

        Returns:
            A `JoinedData`; the batch itself if no term that is due has data of its own.
        """
        step = self._next_step if step is None else step
        due = [term.spec for term in self._terms if term.spec.data is not None and term.due(step)]
        if not due:
            return data
        seed = CallSeed(self.settings.seed, self._calls.calls_of(step))
        return JoinedData(data, {spec.name: seed.data_of(spec, step) for spec in due})

    def needs(self, step: int = 0, data: Any = None) -> tuple[str, ...]:
        """The extra inputs that the regularizers due at `step` need, with `data` if given."""
        due = self.due(step, data)
        return tuple(dict.fromkeys(need for term in due for need in term.spec.needs))

    def begin_step(self, step: int | None) -> int:
        """Return the step of a call that begins: `step`, or for None the one after the last call's.

        A step that breaks the rule is returned and not counted: the call itself refuses it.
        """
        with self._lock:
            begun = self._next_step if step is None else step
            if is_whole(begun, at_least=0):
                self._next_step = int(begun) + 1
        return begun

    def count_call(self, step: object, *, trains: bool = True) -> int:
        """Count a call that begins; returns the number of calls of this step before it."""
        with self._lock:
            return self._calls.count(step, trains=trains)

    def examine(self, step: int, output: CustomLossOutput, data: Any = None) -> None:
        """Warn of what the doctor finds in the output of a call."""
        self._warnings.observe(step, self._base, self._terms, output, data)

    def add(self, spec: RegularizerSpec | Mapping[str, Any]) -> None:
        """Add a regularizer, from the next call on.

        Raises:
            SpecError: it breaks a rule, its name is taken, or there are 100 already.
        """
        with self._lock:
            self._replace_terms([*self._terms, self._term(RegularizerSpec.of(spec))])

    def remove(self, name: str) -> None:
        """Remove a regularizer, from the next call on.

        Raises:
            SpecError: there is none of that name.
        """
        with self._lock:
            gone = self._find(name)
            self._terms = tuple(term for term in self._terms if term is not gone)

    def set_weight(self, name: str, weight: float | Schedule) -> None:
        """Change a weight, from the next call on; a bound is replaced by it.

        Raises:
            SpecError: there is no such regularizer, or the weight breaks a rule.
        """
        self._change(name, weight=weight, at_most=None, at_least=None, scale=None)

    def set_enabled(self, name: str, enabled: bool) -> None:
        """Switch a regularizer on or off, from the next call on.

        Raises:
            SpecError: there is no such regularizer, or `enabled` is not a bool.
        """
        self._change(name, enabled=enabled)

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Objects that keep state between batches, by name: terms, bounds, and the aggregator."""
        named = [(term.name, term.stateful) for term in (self._base, *self._terms)]
        named.append((_AGGREGATE, self.settings.aggregator.stateful))
        return {name: stateful for name, stateful in named if stateful is not None}

    def state_dict(self) -> dict[str, Any]:
        """State of the stateful terms, and of a stateful aggregator, by name."""
        return {name: state.state_dict() for name, state in self.stateful.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned.

        Raises:
            StateError: its names are not exactly those of the stateful terms.
        """
        stateful = self.stateful
        if not isinstance(state, Mapping) or set(state) != set(stateful):
            got = sorted(state) if isinstance(state, Mapping) else repr(state)
            raise StateError(
                f"state must hold exactly the stateful terms {sorted(stateful)}, got {got}."
            )
        for name, term in stateful.items():
            term.load_state_dict(state[name])

    def average_state(self, ranks: Ranks) -> None:
        """Set the mean of all processes' states, so that stateful terms stay the same in each.

        Multipliers are not averaged: they have followed the mean values already. A term that one
        process evaluates has its state there.
        """
        once = {term.name for term in self._terms if term.spec.ranks == "one"}
        moved = {
            name: state
            for name, state in self.stateful.items()
            if not isinstance(state, BoundedState) or state.term is not None
        }
        if not moved:
            return
        by_rank = ranks.gather({name: state.state_dict() for name, state in moved.items()})
        for name, state in moved.items():
            states_of_term = [(share, states[name]) for share, states in by_rank]
            state.load_state_dict(
                mean_state(states_of_term[:1] if name in once else states_of_term)
            )

    def __getstate__(self) -> dict[str, Any]:
        # Locks and pools cannot be pickled: a copy uses the default workers of its process.
        return {**self.__dict__, "_lock": None, "settings": replace(self.settings, workers=None)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def _term(self, spec: RegularizerSpec) -> Term:
        return Term(spec, self._statistics.setdefault(spec.name, CallStatistics()))

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
        names = set(_RESERVED)
        for term in terms:
            if term.name in names:
                why = _RESERVED.get(term.name, "stands twice")
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
        for term in terms:
            spec = term.spec
            if spec.run_in not in ("auto", "inline") and term.statistics.prepared is not spec.fn:
                executor = self.workers.executors[spec.run_in]
                executor.prepare(term.name, (spec.call, spec.options))
                term.statistics.prepared = spec.fn
        self._terms = tuple(terms)


def declared_rows(terms: Iterable[Term]) -> tuple[str, ...]:
    """Names of the base loss and of those of `terms` that an aggregator may compare."""
    return (BASE, *(term.name for term in terms if not term.spec.anchor))


def _base_spec(loss_fn: Any) -> RegularizerSpec:
    if loss_fn is None or not (callable(loss_fn) or hasattr(loss_fn, "compute")):
        raise SpecError(
            f"loss_fn must be the base loss, callable as (data, logprobs), got {loss_fn!r}."
        )
    place = "async" if is_async(loss_fn) else "inline"
    return RegularizerSpec(loss_fn, 1.0, BASE, run_in=place)  # type: ignore[arg-type]  # both are
