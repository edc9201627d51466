"""A term: its spec, what has been learned of it, and the result of one call of it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from steelyard.composition.input_names import Reads
from steelyard.errors import TermBusyError, TermError
from steelyard.execution import Ticket
from steelyard.gradients import Fusable, Joint, Method, Row
from steelyard.penalties.from_logits import is_fusable
from steelyard.spec import BASE, RegularizerSpec, title

# Handing work to a thread and joining it again costs about a tenth of a millisecond, and
# tensor terms gain nothing from threads, so a term has to be much longer than that.
CHEAP = 5e-3


class DetachedTermWarning(UserWarning):
    """A term's loss has no path to the log-probs: it adds to the loss and has no gradient."""


@dataclass
class Facts:
    """What is known about a term from the calls so far."""

    duration: float | None = None
    warned: bool = False
    stuck: Ticket | None = None
    prepared: object = None  # the fn whose calls were seen to run where the term runs

    def __getstate__(self) -> dict[str, object]:
        # A call that hangs hangs here; a copy has none.
        return {**self.__dict__, "stuck": None}


@dataclass(frozen=True, eq=False)
class Term:
    """A spec and the facts about it; a changed spec keeps the facts.

    Attributes:
        spec: the term as the user wrote it.
        facts: what has been learned of it.
        name: the name in the spec.
        is_base: whether it is the base loss.
    """

    spec: RegularizerSpec
    facts: Facts = field(default_factory=Facts)
    name: str = field(init=False)
    is_base: bool = field(init=False)

    def __post_init__(self) -> None:
        # Not cached properties: a compiler stops at those.
        object.__setattr__(self, "name", self.spec.name)
        object.__setattr__(self, "is_base", self.spec.name == BASE)

    @cached_property
    def may_fuse(self) -> bool:
        """Whether it may be computed together with others: here and now, by autograd."""
        spec = self.spec
        return (
            isinstance(spec.fn, Fusable)
            and spec.run_in in ("auto", "inline")
            and spec.timeout is None
            and spec.gradient in ("auto", "autograd")
            and not spec.options
        )

    @cached_property
    def reads_logits(self) -> bool:
        """Whether it is a function of `penalties.from_logits` over named inputs."""
        return isinstance(self.spec.fn, Reads) and is_fusable(self.spec.fn.fn)

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

    def place(self) -> str:
        """Where it runs this time, `"inline"` or the name of an executor.

        `"auto"` is the event loop for an async term. Any other runs in a thread, and inline
        once its last call took less than 5 ms: then a thread would cost more than it gives.
        A term with a timeout of its own stays in a thread, since an inline call cannot be
        stopped, and so does a numerical gradient, which is many calls.
        """
        spec = self.spec
        if spec.run_in != "auto":
            return spec.run_in
        if spec.is_async:
            return "async"
        cheap = self.facts.duration is not None and self.facts.duration < CHEAP
        if cheap and spec.timeout is None and spec.gradient != "numerical":
            return "inline"
        return "thread"

    def check_free(self) -> None:
        """Check that no call of it that timed out is still running.

        Raises:
            TermBusyError: one is.
        """
        stuck = self.facts.stuck
        if stuck is not None and stuck.running:
            raise TermBusyError(
                f"regularizer {self.name!r} must have ended before it starts again, and its call "
                f"that timed out is still running in its thread: use run_in='process', which can "
                f"be killed, or make the term return.",
                term=self.name,
            )
        self.facts.stuck = None

    def failure(self, error: BaseException) -> TermError:
        """The error of this term that `error` is, or is the cause of."""
        if isinstance(error, TermError) and error.term == self.name:
            return error
        message = f"{title(self.name)} failed: {type(error).__name__}: {error}"
        failure = TermError(message, term=self.name)
        failure.__cause__ = error
        return failure

    def warn_detached(self, source: str) -> None:
        """Warn, once, that the term has no gradient with respect to `source`."""
        if not self.facts.warned:
            self.facts.warned = True
            warnings.warn(
                f"{title(self.name)} has no gradient: its loss does not depend on {source} "
                f"through torch, so it adds to the loss and pulls nothing. Use gradient='score' "
                f"(return one penalty per datum) or gradient='numerical'; gradient='none' says "
                f"that it is meant so.",
                DetachedTermWarning,
                stacklevel=_levels_to_the_caller(),
            )


@dataclass(frozen=True, eq=False)
class Group:
    """Terms that were computed together.

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
        weight: its weight at this step; a tensor inside a compiled function.
        place: where it ran.
        space: the names of what its norm is with respect to.
        in_graph: whether it stays in the graph of the inputs when it runs inline.
        value: a scalar, with the caller's graph where there is one; None if it was isolated.
        number: the value as a float, once it was read from its device.
        custom: the metrics it returned.
        method: how its gradient was found; None if there is none.
        duration: seconds; on an accelerator, until its work was queued.
        gradient_duration: seconds its gradient took; None if it was not differentiated here.
        gradients: a row for each space that it has a gradient in.
        group: the terms it was computed with, which have the gradient together.
        skipped: the reason why it was dropped, if it failed and is allowed to.
        started: when it began, for telemetry; 0 if that was not told.
    """

    term: Term
    weight: float | Tensor
    place: str = "inline"
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
    started: float = 0.0

    def drop(self, failure: TermError) -> None:
        """Leave the term out of this step, if it is allowed to fail.

        Raises:
            TermError: it is the base loss, or its `on_error` is `"raise"`.
        """
        if self.term.is_base or self.term.spec.on_error == "raise":
            raise failure
        self.value, self.number, self.gradients, self.group = None, None, {}, None
        self.skipped = f"{type(failure).__name__}: {failure}"


def _levels_to_the_caller() -> int:
    """How far up the stack the library was called: a warning should show that line."""
    levels, frame = 1, sys._getframe(1)  # noqa: SLF001 - the documented way to see the stack
    # Between a call of a torch module and what it does stands torch itself.
    ours = ("steelyard.", "torch.")
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(ours):
        levels, frame = levels + 1, frame.f_back
    return levels
