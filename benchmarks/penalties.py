"""Time of each penalty, forward and backward, against the same formula written in plain torch.

    python -m benchmarks.penalties [--rows 4096] [--classes 32000] [--rounds 7] [--no-compile]

`plain` is the formula without special cases for zero probabilities; `guarded` handles them, and
has the same values as ours everywhere. The methods run in turn within a round, and the results are
medians and quartiles of the ratios within a round: below 1, ours is faster.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from benchmarks.measure import CONSOLE, Row, Timing, against, show
from steelyard import penalties

Formula = Callable[..., Tensor]
# Seconds of every round, by method.
Ways = dict[str, list[float]]
TARGET = 1.05
PAIRS = (("ours", "guarded"), ("ours", "plain compiled"), ("ours compiled", "plain compiled"))
LOG_2 = 0.6931471805599453


@dataclass(frozen=True)
class Case:
    """A penalty and the same formula in plain torch."""

    ours: Formula
    plain: Formula
    guarded: Formula | None = None
    inputs: int = 1
    largest_rows: int | None = None  # orthogonality costs rows² · classes


def _plain_kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1).mean()


def _guarded_kl(p: Tensor, q: Tensor) -> Tensor:
    weight = p.exp()
    ratio = torch.where(weight == 0, 0.0, p - q).clamp(-100.0, 100.0)
    return torch.where(weight == 0, 0.0, weight * ratio).sum(-1).mean()


def _plain_js(p: Tensor, q: Tensor) -> Tensor:
    middle = torch.logaddexp(p, q) - LOG_2
    return 0.5 * (p.exp() * (p - middle) + q.exp() * (q - middle)).sum(-1).mean()


def _guarded_js(p: Tensor, q: Tensor) -> Tensor:
    p_dead, q_dead = p == -torch.inf, q == -torch.inf
    p, q = torch.where(p_dead, -1e30, p), torch.where(q_dead, -1e30, q)
    return _plain_js(p, q)


def _plain_entropy(x: Tensor) -> Tensor:
    return -(x.exp() * x).sum(-1).mean()


def _guarded_entropy(x: Tensor) -> Tensor:
    dead = x == -torch.inf
    safe = torch.where(dead, 0.0, x)
    return -torch.where(dead, 0.0, safe.exp() * safe).sum(-1).mean()


def _plain_orthogonality(x: Tensor) -> Tensor:
    rows = normalize(x, dim=-1, eps=1e-8)
    products = rows @ rows.mT
    return (products - torch.diag(products.diagonal())).square().sum()


def _plain_slope(x: Tensor) -> Tensor:
    [gradient] = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    norm: Tensor = torch.linalg.vector_norm(gradient)
    return (norm - 1.0).square()


CASES = {
    "l1": Case(penalties.l1, lambda x: x.abs().sum()),
    "l2": Case(penalties.l2, lambda x: x.square().sum()),
    "elastic_net": Case(
        penalties.elastic_net, lambda x: 0.5 * x.abs().sum() + 0.5 * x.square().sum()
    ),
    "kl_divergence": Case(penalties.kl_divergence, _plain_kl, _guarded_kl, inputs=2),
    "js_divergence": Case(penalties.js_divergence, _plain_js, _guarded_js, inputs=2),
    "entropy": Case(penalties.entropy, _plain_entropy, _guarded_entropy),
    "orthogonality": Case(penalties.orthogonality, _plain_orthogonality, largest_rows=256),
    "consistency, mse": Case(penalties.consistency, lambda a, b: (a - b).square().mean(), inputs=2),
    "consistency, cosine": Case(
        functools.partial(penalties.consistency, metric="cosine"),
        lambda a, b: (1 - cosine_similarity(a, b, dim=-1, eps=1e-8)).mean(),
        inputs=2,
    ),
    "output_magnitude": Case(
        penalties.output_magnitude_penalty, lambda x: (x.square().mean().sqrt() - 1.0).square()
    ),
    "gradient_penalty": Case(
        lambda x: penalties.gradient_penalty(lambda z: z.square().sum(), x), _plain_slope
    ),
}


def _seconds(fn: Formula, inputs: list[Tensor]) -> float:
    for x in inputs:
        x.grad = None
    start = time.perf_counter()
    fn(*inputs).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return time.perf_counter() - start


def measure(case: Case, rows: int, classes: int, rounds: int, compiled: bool) -> Ways:
    """Run every method once per round, in turn; the first round is a warm-up."""
    rows = min(rows, case.largest_rows or rows)
    inputs = [
        torch.randn(rows, classes).log_softmax(-1).requires_grad_() for _ in range(case.inputs)
    ]
    ways: dict[str, Formula] = {"ours": case.ours, "plain": case.plain}
    if case.guarded is not None:
        ways["guarded"] = case.guarded
    if compiled and case.plain is not _plain_slope:  # Dynamo refuses torch.autograd.grad
        ways["plain compiled"] = torch.compile(case.plain, fullgraph=True)
        ways["ours compiled"] = torch.compile(case.ours, fullgraph=True)
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for turn in range(rounds + 1):
        for name in order:
            seconds = _seconds(ways[name], inputs)
            if turn:
                times[name].append(seconds)
        order = [*order[1:], order[0]]  # what runs after what matters to the allocator
    return times


def row(name: str, case: Case, times: Ways) -> Row:
    """Row with the ratios of the penalty to each of the other methods."""

    def paired(ours: str, other: str) -> Timing:
        pairs = zip(times[ours], times[other], strict=True)
        return Timing(times[ours], [a / b for a, b in pairs])

    note = f" ({case.largest_rows} rows)" if case.largest_rows else ""
    what, measured, target, met = against(name + note, paired("ours", "plain"), TARGET)
    for ours, other in PAIRS:
        if {ours, other} <= times.keys():
            timing = paired(ours, other)
            low, high = timing.spread
            measured += f"; {ours} / {other} {timing.ratio:.2f} ({low:.2f} to {high:.2f})"
    return what, measured, target, met


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Penalties against plain torch, on the CPU.")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--classes", type=int, default=32000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=CASES, help="one penalty instead of all")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    rows = []
    for name, case in CASES.items():
        if given.only in (None, name):
            CONSOLE.print(f"[dim]{name} …")
            compiled = not given.no_compile
            times = measure(case, given.rows, given.classes, given.rounds, compiled)
            rows.append(row(name, case, times))
    show(
        "Penalties on the CPU",
        f"Forward and backward, {given.rows} × {given.classes} float32, against the plain formula "
        "by hand; guarded is one that gives the same numbers at probabilities of 0",
        rows,
        repeats=str(given.rounds),
    )


if __name__ == "__main__":
    main()
