"""A term of a pipeline: its spec, and what the pipeline has learned about it."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

from steelyard.errors import TermBusyError
from steelyard.execution import Lane, Ticket
from steelyard.gradients import Fusable
from steelyard.spec import BASE, RegularizerSpec, title

Place: TypeAlias = Literal["inline"] | Lane

# Handing work to a thread and joining it again costs about a tenth of a millisecond, and
# tensor terms gain nothing from threads, so a term has to be much longer than that.
CHEAP = 5e-3


class DetachedTermWarning(UserWarning):
    """A term's loss has no path to the log-probs: it adds to the loss and pulls nothing."""


@dataclass
class Facts:
    """What is known about a term from the calls so far."""

    duration: float | None = None
    warned: bool = False
    stuck: Ticket | None = None
    travelled: object = None  # the fn that was seen to pickle

    def __getstate__(self) -> dict[str, object]:
        # A call that hangs hangs here; a copy has none.
        return {**self.__dict__, "stuck": None}


@dataclass(frozen=True, eq=False)
class Term:
    """A spec and the facts about it; a changed spec keeps the facts."""

    spec: RegularizerSpec
    facts: Facts = field(default_factory=Facts)

    @cached_property
    def name(self) -> str:
        """The name in the spec."""
        return self.spec.name

    @cached_property
    def is_base(self) -> bool:
        """Whether it is the base loss."""
        return self.spec.name == BASE

    @cached_property
    def grad_space(self) -> str:
        """What its gradient is with respect to: log-probs, or what it asked for beyond them."""
        spec = self.spec
        differentiated = spec.needs and spec.gradient in ("auto", "autograd")
        return "+".join(spec.needs) if differentiated else "logprobs"

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

    def place(self) -> Place:
        """Where it runs this time.

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
        """Nothing, if no call of it that timed out is still running.

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

    def warn_detached(self, source: str = "the log-probs") -> None:
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


def _levels_to_the_caller() -> int:
    """How far up the stack the library was called: a warning should show that line."""
    levels, frame = 1, sys._getframe(1)  # noqa: SLF001 - the documented way to see the stack
    # Between a call of a torch module and what it does stands torch itself.
    ours = ("steelyard.", "torch.")
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(ours):
        levels, frame = levels + 1, frame.f_back
    return levels
