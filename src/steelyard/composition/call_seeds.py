"""Seeds of the random numbers that terms draw, and which terms draw them.

The numbers of a call follow from (seed, step, call within the step, rank, name of the term) alone.
Seeding the global generators takes longer than a small term, so it is done for the terms that were
seen to draw from them, and for calls 1, 2, 4, 8, … of the others, which are watched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import distributed as dist

from steelyard.composition.terms import Term
from steelyard.execution import Randomness


@dataclass(frozen=True)
class CallSeed:
    """Seed of one call of a pipeline or composite.

    Attributes:
        seed: of the training; None: the one that torch was given, `torch.initial_seed()`.
        call: the number of calls of this step before it.
        trains: whether gradients are enabled; calls without are counted by themselves.
        group: the processes that make the call together, each with other numbers; None: all.
    """

    seed: int | None = None
    call: int = 0
    trains: bool = True
    group: dist.ProcessGroup | None = None

    def randomness(self, term: Term, step: int) -> Randomness | None:
        """How a call of a term draws random numbers; None if it draws none."""
        facts, spec = term.facts, term.spec
        watched = not facts.draws and facts.calls & (facts.calls + 1) == 0
        if not (watched or facts.draws or spec.takes_generator):
            return None
        key = self._key(0 if spec.ranks == "one" else self._rank, step, term.name)
        return Randomness(key, spec.takes_generator, watched or facts.draws, watched)

    @property
    def _rank(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 0
        return dist.get_rank(self.group)

    def _key(self, rank: int, step: int, name: str) -> tuple[int, ...]:
        seed = torch.initial_seed() if self.seed is None else self.seed
        return (seed, step, self.call, int(self.trains), rank, *name.encode())


class CallCounter:
    """Counts the calls of the present step."""

    def __init__(self) -> None:
        self._last: dict[bool, tuple[object, int]] = {}

    def count(self, step: object, *, trains: bool = True) -> int:
        """The number of calls of this step before this one."""
        last, calls = self._last.get(trains, (None, 0))
        calls = calls if step == last else 0
        self._last[trains] = step, calls + 1
        return calls
