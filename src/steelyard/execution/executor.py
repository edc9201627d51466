"""`Executor`: the interface of a place to run terms; its subclasses are listed in `workers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steelyard.execution.batch import Ticket


class Executor(ABC):
    """A place where offloaded terms run.

    It starts, ends and settles each ticket; a failure or a timeout affects that ticket alone.

    Attributes:
        awaits: whether the functions of its tickets return coroutines.
        limited: whether `max_concurrency` limits how many tickets run at once.
    """

    awaits = False
    limited = True

    @abstractmethod
    def submit(self, ticket: Ticket) -> None:
        """Start the ticket without waiting for it; errors of its work settle the ticket."""

    @abstractmethod
    def close(self) -> None:
        """Stop running work as far as possible, and accept no more."""

    def deadline(self, ticket: Ticket) -> float | None:  # noqa: ARG002 - for subclasses
        """Time at which the waiting caller gives up; None if the executor enforces timeouts."""
        return None

    def prepare(self, term: str, call: object) -> None:  # noqa: B027 - optional in subclasses
        """Check that calls of a term can run here, and warm up; called before the first call.

        Raises:
            TermError: they cannot.
        """

    def abandon(self) -> None:  # noqa: B027 - optional in subclasses
        """Replace the resources held by a ticket that has timed out and still runs."""
