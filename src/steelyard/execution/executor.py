"""`Executor`: what a place to run terms must offer. One class, and its entry in `workers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steelyard.execution.batch import Ticket


class Executor(ABC):
    """A place where offloaded terms run.

    Each ticket is started, ended and settled, in its own time; a failure or a timeout concerns
    that ticket alone.

    Attributes:
        awaits: whether a ticket's function gives a coroutine, which it awaits.
        limited: whether `max_concurrency` limits how many tickets run at once.
    """

    awaits = False
    limited = True

    @abstractmethod
    def submit(self, ticket: Ticket) -> None:
        """Run the ticket, soon; never raise what the ticket's work raises."""

    @abstractmethod
    def close(self) -> None:
        """End what runs, as far as it can be ended, and take no more."""

    def deadline(self, ticket: Ticket) -> float | None:  # noqa: ARG002 - for those that have one
        """When the waiting caller gives up on a ticket; None if the executor ends it itself."""
        return None

    def prepare(self, term: str, call: object) -> None:  # noqa: B027 - for those that have to
        """Check that calls of a term can run here, and make ready; called before the first.

        Raises:
            TermError: they cannot.
        """

    def abandon(self) -> None:  # noqa: B027 - for those that have to
        """Go on without a ticket that has timed out and still runs."""
