"""Growth of the time of a call with the number of terms, data and tokens, with a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure import Row, Timing, each, show
from steelyard import Pipeline, RegularizerSpec

PLOT = Path(__file__).parents[1] / "docs" / "benchmarks-scaling.svg"
REPEATS = 25
TERMS = (1, 2, 5, 10, 20, 50, 100)
DATA = (1, 4, 16, 64, 256, 1024, 4096)
TOKENS = (16, 64, 256, 1024, 4096, 16384)
# A larger exponent counts as worse than linear growth.
LINEAR = 1.1
MIDDLE, END = 'text-anchor="middle" fill="#888"', 'text-anchor="end" fill="#888"'
COLOURS = ("#3f51b5", "#c2185b", "#00796b")


def base(_: object, logprobs: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logprobs)).mean()


def square(_: object, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).square().mean()


def call(terms: int, data: int, tokens: int) -> Timing:
    """Time of a call with all norms and cosines."""
    torch.manual_seed(0)
    logprobs = [-torch.rand(tokens) for _ in range(data)]
    specs = [RegularizerSpec(square, 0.1, f"t{i}", run_in="inline") for i in range(terms)]
    with Pipeline(base, specs, track_grad_norms=True) as pipeline:
        return each(lambda: pipeline.compute([], logprobs), repeats=REPEATS, warmup=3)


def growth(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Exponent k with time ~ size^k, from the third-last to the last size."""
    first, last = len(sizes) - 3, len(sizes) - 1
    return math.log(times[last] / times[first]) / math.log(sizes[last] / sizes[first])


def plot(lines: Mapping[str, tuple[Sequence[int], Sequence[float]]]) -> str:
    """Plot of the times on logarithmic axes, each relative to its first point."""
    width, height, edge = 640, 360, 60
    top_x = max(sizes[-1] / sizes[0] for sizes, _ in lines.values())
    top_y = max(max(times) / times[0] for _, times in lines.values())

    def at(x: float, y: float) -> tuple[float, float]:
        across = edge + (width - 2 * edge) * math.log(x) / math.log(top_x)
        up = height - edge - (height - 2 * edge) * math.log(max(y, 1.0)) / math.log(top_y)
        return round(across, 1), round(up, 1)

    x, y = at(min(top_x, top_y), min(top_x, top_y))
    low, middle, floor = height - edge, width / 2, height - 14
    said = f'text-anchor="middle" transform="rotate(-90 16 {height / 2})"'
    parts = [
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M {edge} {edge} V {low} H {width - edge}" fill="none" stroke="#888"/>',
        f'<path d="M {edge} {low} L {x} {y}" stroke="#bbb" stroke-dasharray="4"/>',
        f'<text x="{x - 40}" y="{y - 6}" fill="#888">linear</text>',
        f'<text x="{middle}" y="{floor}" text-anchor="middle">size, relative (log)</text>',
        f'<text x="16" y="{height / 2}" {said}>time, relative (log)</text>',
    ]
    for power in range(1, math.floor(math.log10(max(top_x, top_y))) + 1):
        label, ten = f"×{10**power}", 10.0**power
        if ten <= top_x:
            parts.append(f'<text x="{at(ten, 1)[0]}" y="{low + 16}" {MIDDLE}>{label}</text>')
        if ten <= top_y:
            parts.append(f'<text x="{edge - 6}" y="{at(1, ten)[1]}" {END}>{label}</text>')
    for i, (name, (sizes, times)) in enumerate(lines.items()):
        colour = COLOURS[i]
        points = [at(s / sizes[0], t / times[0]) for s, t in zip(sizes, times, strict=True)]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points]
        label = f"{name}: {sizes[0]} to {sizes[-1]}"
        parts.append(f'<text x="{edge + 12}" y="{edge + 18 * i}" fill="{colour}">{label}</text>')
    shape = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>', *parts, "</svg>\n"])


def main() -> None:
    """Measure, print and draw."""
    ways: dict[str, tuple[Sequence[int], Callable[[int], Timing]]] = {
        "terms": (TERMS, lambda n: call(n, 32, 256)),
        "data": (DATA, lambda n: call(5, n, 64)),
        "tokens": (TOKENS, lambda n: call(5, 32, n)),
    }
    rows: list[Row] = []
    lines = {}
    for name, (sizes, way) in ways.items():
        timings = [way(size) for size in sizes]
        times = [timing.median for timing in timings]
        lines[name] = (sizes, times)
        power = growth(sizes, times)
        low, high = timings[-1].within
        measured = (
            f"{times[0] * 1e3:.2f} to {times[-1] * 1e3:.1f} ms ({low * 1e3:.1f} to "
            f"{high * 1e3:.1f}), in the end size^{power:.2f}"
        )
        what = f"{name}, {sizes[0]} to {sizes[-1]}"
        rows.append((what, measured, f"≤ size^{LINEAR}", power <= LINEAR))
    PLOT.write_text(plot(lines), encoding="utf-8")
    show(
        "Scaling",
        "A call with all norms and cosines; 32 data of 256 tokens for terms, 5 terms otherwise",
        rows,
        repeats=str(REPEATS),
        notes=[f"![Cost against size]({PLOT.name})"],
    )


if __name__ == "__main__":
    main()
