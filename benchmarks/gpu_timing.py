"""GPU time of a step in a full queue, and its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks.measure import Row

Way: TypeAlias = Callable[[], object]
LITTLE = 0.01


class Timing(NamedTuple):
    """Milliseconds on the GPU (median and quartiles), and in Python (mean)."""

    median: float
    low: float
    high: float
    host: float


def timed(way: Way, repeats: int = 20) -> Timing:
    """Time calls on the GPU.

    A sleep kernel holds the queue until all calls are submitted, so that the events measure the
    GPU only, and not the time that Python needs to submit them.
    """
    for _ in range(3):
        began = time.perf_counter()
        way()
        once = time.perf_counter() - began
        torch.cuda.synchronize()
    event: Any = torch.cuda.Event  # without types, as `_sleep` and `backward`
    marks = [event(enable_timing=True) for _ in range(repeats + 1)]
    sleep: Any = torch.cuda._sleep
    sleep(int(4e9 * once * repeats))  # cycles, at less than 2 GHz
    marks[0].record()
    began = time.perf_counter()
    for mark in marks[1:]:
        way()
        mark.record()
    host = 1e3 * (time.perf_counter() - began) / repeats
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) for a, b in pairwise(marks)]
    low, median, high = statistics.quantiles(spans, n=4)
    return Timing(median, low, high, host)


def extra(way: Way) -> float:
    """Gigabytes at the peak of a step, above the memory in use after it, gradients included."""
    way()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def measured(
    name: str, way: Way, floor: float, *, repeats: int = 20, asked: float | None = None
) -> tuple[Row, float]:
    """Row of the table, and the gigabytes at the peak."""
    try:
        memory = extra(way)
        found = timed(way, repeats)
    except torch.OutOfMemoryError:
        return (name, "out of memory", "", None), 0.0
    ratio = found.median / floor
    text = (
        f"{found.median:.3f} ms [{found.low:.3f}, {found.high:.3f}] of {repeats}, "
        f"{ratio:.2f} × floor, +{memory:.2f} GB"
    )
    if asked is None:
        row: Row = (name, text, "", None)
    else:
        row = (name, f"{text}; Python {found.host:.2f} ms", f"≤ {asked} × floor", ratio <= asked)
    print(*row[:3], flush=True)
    return row, memory


def memory_row(name: str, memory: float, logits: Tensor) -> Row:
    """Row with the memory that a step takes in addition to the gradient."""
    share = 1e9 * memory / logits.nbytes
    return (
        f"{name}: memory beyond the gradient",
        f"{share:.2%} of the logits",
        "≤ 0.2 %",
        share <= 0.002,
    )
