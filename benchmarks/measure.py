"""Time several methods in turn, and print the results."""

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
    """Seconds of each repeat of one method, and its ratios to the reference, repeat by repeat."""

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
        """Quartiles of the paired ratios."""
        return _quartiles(self.ratios)

    @property
    def within(self) -> tuple[float, float]:
        """Quartiles of the times."""
        return _quartiles(self.seconds)


def _quartiles(numbers: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(numbers, n=4)
    return low, high


def in_turn(
    ways: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 10
) -> dict[str, Timing]:
    """Time every method once per repeat; the first is the reference of the ratios.

    Methods alternate, so that a change of the machine's load affects all of them alike.
    """
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


def each(way: Callable[[], object], *, repeats: int, warmup: int = 10) -> Timing:
    """Time one method."""
    return in_turn({"": way}, repeats=repeats, warmup=warmup)[""]


# Label, measured value with its quartiles, target, and whether the target is met.
Row: TypeAlias = tuple[str, str, str, bool | None]


def against(what: str, timing: Timing, at_most: float | None = None) -> Row:
    """Row with the time as a multiple of the reference."""
    measured = f"{_ratio(timing)}, {_time(timing.median)}"
    if at_most is None:
        return what, measured, "", None
    return what, measured, f"≤ {at_most:.2f} ×", timing.ratio <= at_most


def faster(what: str, timing: Timing, at_least: float) -> Row:
    """Row with the speedup: the time of the slower method divided by the reference."""
    target = f"≥ {at_least:.1f} × (two cores)"
    return what, f"{_ratio(timing)} faster", target, timing.ratio >= at_least


def takes(what: str, timing: Timing, at_most: float) -> Row:
    """Row with a time, whose target is a time."""
    low, high = timing.within
    measured = f"{_time(timing.median)} ({_time(low)} to {_time(high)})"
    return what, measured, f"≤ {_time(at_most)}", timing.median <= at_most


def _ratio(timing: Timing) -> str:
    low, high = timing.spread
    return f"{timing.ratio:.2f} × ({low:.2f} to {high:.2f})"


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


@dataclass(frozen=True)
class Shown:
    """A printed table: measured values, their targets, and whether these are met."""

    title: str
    conditions: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


SHOWN: list[Shown] = []


def show(
    title: str, conditions: str, rows: Sequence[Row], *, repeats: str, notes: Sequence[str] = ()
) -> Shown:
    """Print a table, and keep it for the page; only the page has the notes."""
    said = f"{conditions}; {repeats} repeats"
    shown = Shown(title, said, rows, notes)
    SHOWN.append(shown)
    table = Table(title=f"{title}: {said}", title_justify="left", title_style="bold")
    for heading in ("what", "measured", "target", ""):
        table.add_column(heading)
    marks = {True: "[green]met", False: "[red]missed", None: ""}
    for what, measured, target, met in rows:
        table.add_row(what, measured, target, marks[met])
    CONSOLE.print(table)
    return shown
