"""Seeds of the random numbers that terms draw, and which terms draw them.

The numbers of a call follow from (seed, step, call within the step, rank, name of the term) alone.
Seeding the global generators takes longer than a small term, so it is done for the terms that were
seen to draw from them, and for calls 1, 2, 4, 8, … of the others, which are watched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from steelyard.composition.own_data import indices_of_call
from steelyard.composition.terms import Term
from steelyard.execution.random_state import Randomness
from steelyard.spec.regularizer import RegularizerSpec


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
        """Random numbers of a call of a term; None if it draws none."""
        statistics, spec = term.statistics, term.spec
        watched = not statistics.draws and statistics.calls & (statistics.calls + 1) == 0
        if not (watched or statistics.draws or spec.takes_generator):
            return None
        key = self._key(0 if spec.ranks == "one" else self._rank, step, term.name)
        return Randomness(key, spec.takes_generator, watched or statistics.draws, watched)

    @property
    def _rank(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 0
        return dist.get_rank(self.group)

    def data_of(self, spec: RegularizerSpec, step: int) -> list[Any]:
        """Those of a term's own data that a call at this step has; they do not depend on others.

        An item of the data that is a list, such as a pair, is taken as a whole.
        """
        items = [(spec.data or ())[index] for index in self.indices_of(spec, step)]
        lists = [item if isinstance(item, list) else [item] for item in items]
        return [datum for data in lists for datum in data]

    def indices_of(self, spec: RegularizerSpec, step: int) -> list[int]:
        """Indices of these items in the data of the term."""
        seed = (self._seed, self.call, self._rank, *spec.name.encode())
        return indices_of_call(step // spec.every, spec.per_step, len(spec.data or ()), seed)

    @property
    def _seed(self) -> int:
        return torch.initial_seed() if self.seed is None else self.seed

    def _key(self, rank: int, step: int, name: str) -> tuple[int, ...]:
        return (self._seed, step, self.call, int(self.trains), rank, *name.encode())


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

    def calls_of(self, step: object) -> int:
        """The number of calls of this step so far."""
        last, calls = self._last.get(True, (None, 0))
        return calls if step == last else 0
