"""Timing several ways of one thing in turn, and printing what came out."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

CONSOLE = Console()


@dataclass(frozen=True)
class Timing:
    """Seconds of each iteration of one way, and its ratios to the reference, pair by pair."""

    seconds: list[float]
    ratios: list[float]

    @property
    def median(self) -> float:
        """Median time."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Median of the paired ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the paired ratios."""
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return low, high


def in_turn(
    ways: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 10
) -> dict[str, Timing]:
    """Time every way once per round; the first is the reference of the ratios."""
    for way in ways.values():
        for _ in range(warmup):
            way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - began)
    finally:
        gc.enable()
    reference = seconds[next(iter(ways))]
    return {
        name: Timing(own, [a / b for a, b in zip(own, reference, strict=True)])
        for name, own in seconds.items()
    }


def each(way: Callable[[], object], *, repeats: int, warmup: int = 10) -> float:
    """Median seconds of one call."""
    return in_turn({"": way}, repeats=repeats, warmup=warmup)[""].median


Row: TypeAlias = tuple[str, str, str, bool | None]


@dataclass(frozen=True)
class Shown:
    """A table that was printed: figures beside their targets, and whether these are met."""

    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


SHOWN: list[Shown] = []


def show(title: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """Print figures beside their targets, and keep them; notes are for the page alone."""
    SHOWN.append(Shown(title, rows, notes))
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("what", "measured", "target", ""):
        table.add_column(heading)
    marks = {True: "[green]met", False: "[red]missed", None: ""}
    for what, measured, target, met in rows:
        table.add_row(what, measured, target, marks[met])
    CONSOLE.print(table)
