"""What a step costs a GPU: its time in a full queue, and its memory."""

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
    """Milliseconds on the GPU, median and quartiles, and of Python, the mean."""

    median: float
    low: float
    high: float
    host: float


def timed(way: Way, repeats: int = 20) -> Timing:
    """Time calls that wait in a full queue."""
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
    """Gigabytes at the peak beyond what is there after a step, the gradients included."""
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
    """A row of the table, and the gigabytes."""
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


def beyond(name: str, memory: float, logits: Tensor) -> Row:
    """The memory that is taken beside the gradient."""
    share = 1e9 * memory / logits.nbytes
    return (
        f"{name}: memory beyond the gradient",
        f"{share:.2%} of the logits",
        "≤ 1 %",
        share <= 0.01,
    )
