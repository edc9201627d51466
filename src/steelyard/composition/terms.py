"""Term: a spec with the statistics of its calls; and the result of one call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor

from steelyard.composition.bounds import BoundedState, Multiplier
from steelyard.composition.input_names import Reads
from steelyard.errors import TermBusyError
from steelyard.execution.executor import Ticket
from steelyard.execution.random_state import Randomness
from steelyard.gradients.algebra import Row
from steelyard.gradients.isolated import Method
from steelyard.gradients.layout import LogProbs
from steelyard.penalties.from_logits.fusion import is_fusable
from steelyard.spec.error_messages import BASE, title
from steelyard.spec.protocol import Stateful
from steelyard.spec.regularizer import RegularizerSpec
from steelyard.spec.weights import Bound

LOGPROBS, PARAMETERS = "logprobs", "parameters"  # spaces of gradients

_UNMEASURED_CALLS = 20  # calls that all returned None, at which that is reported


class DetachedTermWarning(UserWarning):
    """A term's loss has no path to the log-probs: it adds to the loss and has no gradient."""


class UnmeasuredTermWarning(UserWarning):
    """A term has returned None at all of its calls, as one without `return` does."""


class UncomparedTermWarning(UserWarning):
    """A term has chosen extra inputs by its data: its gradient is compared with no other."""


class LostStateWarning(UserWarning):
    """A term changes its object in a worker process, which is lost when the call ends."""


@dataclass
class CallStatistics:
    """Statistics of a term from its calls so far.

    Attributes:
        duration: seconds of the last call.
        warned: whether it was reported as having no gradient.
        unmeasured_calls: number of calls that returned None, until one returned a value.
        warned_of_state: whether it was reported as losing its state.
        warned_of_space: whether it was reported as compared with no other term.
        stuck: the ticket of a call that timed out and still runs.
        prepared: the `fn` that its executor has accepted.
        inline_calls: number of its inline calls.
        calls: number of its calls that ended well.
        draws: whether it was seen to draw from a global random generator.
        multiplier: controller of its weight, if it has a bound.
    """

    duration: float | None = None
    warned: bool = False
    unmeasured_calls: int = 0
    warned_of_state: bool = False
    warned_of_space: bool = False
    stuck: Ticket | None = None
    prepared: object = None
    inline_calls: int = 0
    calls: int = 0
    draws: bool = False
    multiplier: Multiplier = field(default_factory=Multiplier)

    def __getstate__(self) -> dict[str, object]:
        # A stuck call belongs to this process; a copy has none.
        return {**self.__dict__, "stuck": None}


@dataclass(frozen=True, eq=False)
class Term:
    """A spec and the statistics of its calls; a changed spec keeps the statistics.

    Attributes:
        spec: the term as the user wrote it.
        statistics: of its calls.
        name: the name in the spec.
        is_base: whether it is the base loss.
        is_bounded: whether it has a bound instead of a weight.
    """

    spec: RegularizerSpec
    statistics: CallStatistics = field(default_factory=CallStatistics)
    name: str = field(init=False)
    is_base: bool = field(init=False)
    is_bounded: bool = field(init=False)

    def __post_init__(self) -> None:
        # Plain attributes: torch.compile breaks the graph at cached properties.
        object.__setattr__(self, "name", self.spec.name)
        object.__setattr__(self, "is_base", self.spec.name == BASE)
        object.__setattr__(self, "is_bounded", self.spec.is_bounded)

    @cached_property
    def stateful(self) -> Stateful | None:
        """Object that keeps state between batches: the term, its multiplier, or both; else None."""
        own = self.spec.stateful
        return BoundedState(self.statistics.multiplier, own) if self.is_bounded else own

    @cached_property
    def may_fuse(self) -> bool:
        """Whether it may be fused with others: it runs inline and is differentiated by autograd."""
        spec = self.spec
        return (
            isinstance(spec.fn, Fusable)
            and spec.run_in in ("auto", "inline")
            and spec.timeout is None
            and spec.gradient in ("auto", "autograd")
            and not spec.options
            and spec.data is None
            and not self.is_bounded  # the weight is not known before the value
        )

    @cached_property
    def reads_logits(self) -> bool:
        """Whether it is a function of `penalties.from_logits` over named inputs, with a weight."""
        fn = self.spec.fn
        is_fused = isinstance(fn, Reads) and is_fusable(fn.fn)
        return is_fused and not self.is_bounded and self.spec.data is None

    def for_data(self, data: Any, gives: Collection[str]) -> Term:
        """The term with the extra inputs that it reads with these data."""
        spec = self.spec.for_data(data, gives)
        return self if spec is self.spec else replace(self, spec=spec)

    def due(self, step: int) -> bool:
        """Whether it runs at a step."""
        return self.spec.enabled and step % self.spec.every == 0

    def weight_at(self, step: int) -> float:
        """The weight at a step.

        Raises:
            SpecError: a schedule yields a bad weight there.
        """
        weight = self.spec.weight
        return weight if isinstance(weight, float) else self.spec.weight_at(step)

    def check_free(self) -> None:
        """Check that no call of it that timed out is still running.

        Raises:
            TermBusyError: one is.
        """
        stuck = self.statistics.stuck
        if stuck is not None and stuck.running:
            raise TermBusyError(
                f"regularizer {self.name!r} must have ended before it starts again, and its call "
                f"that timed out is still running in its thread: use run_in='process', which can "
                f"be killed, or make the term return.",
                term=self.name,
            )
        self.statistics.stuck = None

    def warn_detached(self, source: str) -> None:
        """Warn, once, that the term has no gradient with respect to `source`."""
        if not self.statistics.warned:
            self.statistics.warned = True
            warnings.warn(
                f"{title(self.name)} has no gradient: its loss does not depend on {source} "
                f"through torch, so it adds to the loss and does not affect training. Use "
                f"gradient='score' (return one penalty per datum) or gradient='numerical'; "
                f"gradient='none' says that it is meant so.",
                DetachedTermWarning,
                stacklevel=levels_to_the_caller(),
            )

    def warn_if_never_measured(self) -> None:
        """Count a call that returned None; warn, once, if all calls so far have."""
        facts = self.statistics
        facts.unmeasured_calls += facts.duration is None
        if facts.duration is None and facts.unmeasured_calls == _UNMEASURED_CALLS:
            warnings.warn(
                f"{title(self.name)} has returned None, which says that a batch has nothing to "
                f"measure, at its first {_UNMEASURED_CALLS} calls: return a loss, or take the term "
                f"off.",
                UnmeasuredTermWarning,
                stacklevel=levels_to_the_caller(),
            )

    def warn_uncompared(self) -> None:
        """Warn, once, that its gradient is with respect to extra inputs that the data asked for."""
        if not self.statistics.warned_of_space:
            self.statistics.warned_of_space = True
            needs = " and ".join(self.spec.needs)
            warnings.warn(
                f"{title(self.name)} reads {needs} with these data, and its gradient is with "
                f"respect to that: it has no cosine with the base loss and is not in "
                f"total_grad_norm. grad_space='parameters' compares it with the others; "
                f"needs={self.spec.needs!r} in its spec says that it is meant so.",
                UncomparedTermWarning,
                stacklevel=levels_to_the_caller(),
            )

    def warn_lost_state(self, changed: Sequence[str]) -> None:
        """Warn, once, that a call in a worker process has changed attributes of its object."""
        if not self.statistics.warned_of_state:
            self.statistics.warned_of_state = True
            names = ", ".join(map(repr, changed))
            warnings.warn(
                f"{title(self.name)} with run_in={self.spec.run_in!r} must keep nothing from call "
                f"to call, and its call has changed {names}: each call begins with the object as "
                f"it was sent. Give it state_dict and load_state_dict and run it in a thread or "
                f"inline, or leave what is only a cache out of its __getstate__.",
                LostStateWarning,
                stacklevel=levels_to_the_caller(),
            )


@dataclass(frozen=True, eq=False)
class Group:
    """Fused terms and their common result.

    Attributes:
        names: of the terms.
        joint: their result.
        gradients: of the weighted total, by space, where it was differentiated.
    """

    names: tuple[str, ...]
    joint: Joint
    gradients: Mapping[str, Row] = field(default_factory=dict)


@dataclass(eq=False)
class TermResult:
    """The result of one call of one term.

    Attributes:
        term: the base loss or a regularizer.
        weight: its weight at this step, negative under a lower bound; a tensor inside a compiled
            function.
        executor: where it ran: `"inline"` or the name of an executor.
        space: names of the inputs that its gradient norm is with respect to.
        in_graph: whether it runs in the autograd graph of the inputs when it is inline.
        value: a scalar, with the caller's graph if there is one; None if the call was isolated.
        number: the value as a float, once it has been read from its device.
        custom: the metrics it returned.
        method: how its gradient was computed; None if it has none.
        duration: seconds; on an accelerator, until its work was queued.
        gradient_duration: seconds its gradient took; None if it was not differentiated here.
        gradients: a row for each space that it has a gradient in.
        group: the terms it was fused with; their gradient is that of the group's total.
        skipped: the reason for which it was skipped, if it failed with `on_error="skip"`.
        failed_at: index of the datum at which it failed then, if that is known.
        measured: False if the term returned None: the batch has nothing that it measures.
        started: start time for telemetry; 0 if no start event was emitted.
        bound: the bound of its value at this step; None for a term with a weight.
        randomness: how it draws random numbers; None if it draws none.
    """

    term: Term
    weight: float | Tensor
    executor: str = "inline"
    space: tuple[str, ...] = ()
    in_graph: bool = True
    value: Tensor | None = None
    number: float | None = None
    custom: Mapping[str, Any] = field(default_factory=dict)
    method: Method | None = None
    duration: float = 0.0
    gradient_duration: float | None = None
    gradients: Mapping[str, Row] = field(default_factory=dict)
    group: Group | None = None
    skipped: str | None = None
    failed_at: int | None = None
    measured: bool = True
    started: float = 0.0
    bound: Bound | None = None
    randomness: Randomness | None = None

    @property
    def compared_with(self) -> tuple[tuple[str, ...], str]:
        """Key of the gradients that its own is compared with: those of equal key.

        Its space, and the term whose log-probs they are. The log-probs of a term's own data are no
        other term's, and inner products with gradients there would be 0 and say nothing; all terms
        have the parameters in common.
        """
        own = self.term.spec.data is not None and self.space != (PARAMETERS,)
        return self.space, self.term.name if own else ""

    @property
    def takes_turns(self) -> bool:
        """Whether it changes the global random generators, which the threads share."""
        return self.randomness is not None and self.randomness.seeds_global

    @property
    def ran(self) -> bool:
        """Whether the term has a value: it was not skipped, and measured something."""
        return self.measured and self.skipped is None


def levels_to_the_caller() -> int:
    """Stack levels up to the caller of the library, whose line a warning should show."""
    levels, frame = 1, sys._getframe(1)  # noqa: SLF001 - the documented way to see the stack
    # Frames of torch lie between the call of an nn.Module and its forward method.
    ours = ("steelyard.", "torch.")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(ours):
        levels, frame = levels + 1, frame.f_back
    return levels


@dataclass(frozen=True, eq=False)
class Joint:
    """Result of several fused terms.

    Attributes:
        values: the unweighted value of each term, scalar tensors.
        total: their weighted sum, with a graph to their inputs.
        norms: the L2 norm of each term's gradient; empty unless tracked.
        cosines: of each pair of terms, by their indices; empty unless tracked.
        total_norm: the norm of the gradient of `total`, if it is known.
    """

    values: Sequence[Tensor]
    total: Tensor
    norms: Sequence[float] = ()
    cosines: Mapping[tuple[int, int], float] = field(default_factory=dict)
    total_norm: float | None = None


@runtime_checkable
class Fusable(Protocol):
    """A regularizer that can be computed together with others, faster than one by one.

    It returns a loss without metrics, and reads only the shape of the log-probs.
    """

    def fuses_with(self, other: object, *, tracked: bool) -> bool:
        """Whether the two can be computed together, with norms and cosines if `tracked`."""

    def compute_together(
        self,
        others: Sequence[Self],
        weights: Sequence[float],
        data: Any,
        logprobs: LogProbs,
        *,
        tracked: bool,
        **needed: Any,
    ) -> Joint | None:
        """Compute it and `others` at once; None if the batch has nothing that they measure.

        Args:
            others: regularizers that it fuses with.
            weights: its own first, then theirs.
            data: as for `compute`.
            logprobs: as for `compute`.
            tracked: whether to compute norms and cosines.
            needed: the extra inputs that they need, the same for all.
        """
