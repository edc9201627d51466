"""Full-vocabulary terms on a GPU, against eager torch, torch.compile, Liger-Kernel and the floor.

    PYTHONPATH=src python -m benchmarks.gpu            # 4096 × 128256 logits in bfloat16
    PYTHONPATH=src python -m benchmarks.gpu 512 8192   # rows and classes, for a quick run
    PYTHONPATH=src python -m benchmarks.gpu --save benchmarks/results/gpu.json

The floor is the time of the memory traffic alone, measured in the same run: each input is read
once, the gradient is written once. Times are medians of the GPU time of forward and backward pass,
with quartiles, while the GPU's queue is full; our rows also have the time that Python needs to
fill it. The next `make bench`, which may run on a machine without a GPU, puts the saved tables
into `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_timing import Way, measured, memory_row, timed
from benchmarks.measure import Row, Shown, show
from steelyard.penalties.from_logits import compose_linear, compose_logits

try:
    from liger_kernel.transformers.functional import liger_jsd, liger_kl_div
except ImportError:  # without it, its rows are left out
    liger_jsd = liger_kl_div = None

FOUR: list[Any] = [
    "cross_entropy",
    ("entropy", {"weight": 0.01, "mode": "bonus"}),
    ("z_loss", {"weight": 1e-4}),
    ("kl", {"weight": 0.1, "direction": "reverse"}),
]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a GPU and a torch with CUDA.")
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", type=int, nargs="*", default=[4096, 128256])
    parser.add_argument("--save", type=Path)
    given = parser.parse_args()
    rows, classes = given.sizes
    print(machine())
    tables = [
        terms(rows, classes),
        vocabularies(rows * classes),
        linear(4 * rows, classes, 4096 if rows >= 4096 else 256),
    ]
    if given.save is not None:
        save(tables, given.save)


def machine() -> str:
    """Name of the GPU and the versions, in one line."""
    found = [torch.cuda.get_device_name(), f"CUDA {torch.version.cuda}"]
    for name in ("torch", "triton", "liger-kernel"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def save(tables: list[Shown], path: Path) -> None:
    """Save the tables, with the date and the machine, for `benchmarks.page`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {
        "command": "python -m benchmarks.gpu --save benchmarks/results/gpu.json",
        "date": str(dt.datetime.now(tz=dt.UTC).date()),
        "machine": machine(),
        "tables": [asdict(table) for table in tables],
    }
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def backward(loss: Callable[..., Any], *leaves: Tensor) -> Way:
    def way() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(loss(*leaves))

    return way


def floors(z: Tensor, q: Tensor) -> tuple[float, float]:
    """Milliseconds to read one input, or two, and write as much as one."""
    out = torch.empty_like(z)
    return timed(lambda: out.copy_(z)).median, timed(lambda: torch.add(z, q, out=out)).median


def products(hidden: Tensor, weight: Tensor) -> float:
    """Milliseconds of the three matrix products that a linear layer and its loss need."""
    slopes = torch.randn(len(hidden), len(weight), device="cuda", dtype=hidden.dtype)
    logits = torch.empty_like(slopes)

    def three() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(slopes, weight)
        torch.mm(slopes.t(), hidden)

    return timed(three, 6).median


def terms(rows: int, classes: int) -> Shown:
    made = torch.Generator("cuda").manual_seed(0)
    z = 3 * torch.randn(rows, classes, device="cuda", generator=made)
    q = (z + torch.randn(rows, classes, device="cuda", generator=made)).bfloat16()
    z = z.bfloat16().requires_grad_()
    t = torch.randint(0, classes, (rows,), device="cuda", generator=made)
    one, two = floors(z.detach(), q)

    def entropy(z: Tensor) -> Tensor:
        p = z.float().log_softmax(-1)
        return -(p.exp() * p).sum(-1).mean()

    def forward(z: Tensor) -> Tensor:
        p, b = z.float().log_softmax(-1), q.float().log_softmax(-1)
        return (p.exp() * (p - b)).sum(-1).mean()

    def reverse(z: Tensor) -> Tensor:
        p, b = z.float().log_softmax(-1), q.float().log_softmax(-1)
        return (b.exp() * (b - p)).sum(-1).mean()

    def js(z: Tensor) -> Tensor:
        p, b = z.float().log_softmax(-1), q.float().log_softmax(-1)
        m = torch.logaddexp(p, b) - 0.6931471805599453
        return 0.5 * (p.exp() * (p - m) + b.exp() * (b - m)).sum(-1).mean()

    def four(z: Tensor) -> Tensor:
        p, b = z.float().log_softmax(-1), q.float().log_softmax(-1)
        total = functional.nll_loss(p, t) + 0.01 * (p.exp() * p).sum(-1).mean()
        total = total + 1e-4 * (z.float().logsumexp(-1) ** 2).mean()
        return total + 0.1 * (b.exp() * (b - p)).sum(-1).mean()

    def ours(named: list[Any], tracked: bool = False) -> Callable[[Tensor], Any]:
        def loss(z: Tensor) -> Any:
            return compose_logits(z, named, reference=q, targets=t, track_grad_norms=tracked).total

        return loss

    cases: list[tuple[str, Callable[[Tensor], Any], list[Any], float, float]] = [
        ("entropy", entropy, ["entropy"], one, 1.15),
        ("forward KL", forward, ["kl"], two, 1.2),
        ("reverse KL", reverse, [("kl", {"direction": "reverse"})], two, 1.2),
        ("JS", js, ["js"], two, 1.6),
        ("four together", four, FOUR, two, 1.25),
    ]
    table: list[Row] = []
    for name, formula, named, floor, asked in cases:
        row, memory = measured(f"{name}: ours", backward(ours(named), z), floor, asked=asked)
        table.append(row)
        if named is FOUR:
            table.append(memory_row(name, memory, z))
        eager, compiled = backward(formula, z), backward(torch.compile(formula), z)
        table.append(measured(f"{name}: eager", eager, floor, repeats=4)[0])
        table.append(measured(f"{name}: torch.compile", compiled, floor, repeats=8)[0])
        torch._dynamo.reset()
    tracked = backward(ours(FOUR, tracked=True), z)
    row, memory = measured("four together, tracked: ours", tracked, two, asked=1.4)
    table += [row, memory_row("four together, tracked", memory, z)]
    table += graph_rows("four together, tracked, in a CUDA graph", ours(FOUR, tracked=True), z, two)
    table += liger(z, q, two)
    note = (
        f"The floor is {one:.3f} ms with one input and {two:.3f} ms with two. The four are "
        "cross-entropy, entropy, z-loss and reverse KL; tracked: with the norm of each one's "
        "gradient and all cosines."
    )
    return show(
        "Terms from logits on a GPU",
        f"Forward and backward, {rows} × {classes} bfloat16",
        table,
        repeats="4 to 20",
        notes=[note],
    )


def graph_rows(name: str, loss: Callable[[Tensor], Any], z: Tensor, floor: float) -> list[Row]:
    """Rows of a step that is captured once and replayed: Python then launches one graph."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(loss(z), z)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        gradient = torch.autograd.grad(loss(z), z)
    found = timed(graph.replay)
    del gradient
    ratio = found.median / floor
    rows: list[Row] = [
        (name, f"{found.median:.3f} ms, {ratio:.2f} × floor", "≤ 1.4 × floor", ratio <= 1.4),
        (f"{name}: Python", f"{found.host:.3f} ms", "≤ 0.15 ms", found.host <= 0.15),
    ]
    for row in rows:
        print(*row[:3], flush=True)
    return rows


def vocabularies(elements: int) -> Shown:
    """Four together at other vocabularies, with as many logits."""
    table: list[Row] = []
    for classes in (32000, 50257, 151936, 262144):
        made = torch.Generator("cuda").manual_seed(2)
        shape = (max(elements // classes, 1), classes)
        z = (3 * torch.randn(shape, device="cuda", generator=made)).bfloat16()
        q = (z + torch.randn(shape, device="cuda", generator=made)).bfloat16()
        t = torch.randint(0, classes, shape[:1], device="cuda", generator=made)
        _, floor = floors(z, q)
        z.requires_grad_()

        def loss(z: Tensor, q: Tensor = q, t: Tensor = t) -> Any:
            return compose_logits(z, FOUR, reference=q, targets=t).total

        name = f"four together, {shape[0]} × {classes}"
        table.append(measured(name, backward(loss, z), floor, asked=1.35)[0])
    return show(
        "Terms from logits at other vocabularies",
        "Forward and backward, bfloat16",
        table,
        repeats="20",
    )


def liger(z: Tensor, q: Tensor, floor: float) -> list[Row]:
    """Rows of Liger-Kernel, which reads log-probabilities; none if it is not installed."""
    if liger_kl_div is None:
        return []
    b = q.float().log_softmax(-1)
    losses = {
        "forward KL": lambda z: liger_kl_div(z.float().log_softmax(-1), b.exp()),
        "JS": lambda z: liger_jsd(z.float().log_softmax(-1), b),
    }
    return [
        measured(f"{name}: Liger-Kernel, after log_softmax", backward(loss, z), floor, repeats=6)[0]
        for name, loss in losses.items()
    ]


def linear(tokens: int, classes: int, features: int) -> Shown:
    made = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(tokens, features, device="cuda", generator=made).bfloat16()
    weight = (torch.randn(classes, features, device="cuda", generator=made) / 64).bfloat16()
    targets = torch.randint(0, classes, (tokens,), device="cuda", generator=made)
    named: list[Any] = ["cross_entropy", FOUR[1], FOUR[2]]
    floor = products(hidden, weight)
    hidden.requires_grad_()
    weight.requires_grad_()

    def composed(h: Tensor, w: Tensor) -> Any:
        return compose_linear(h, w, named, targets=targets).total

    def with_logits(h: Tensor, w: Tensor) -> Tensor:
        p = (h @ w.t()).float()
        logs = p.log_softmax(-1)
        total = functional.nll_loss(logs, targets) + 0.01 * (logs.exp() * logs).sum(-1).mean()
        return total + 1e-4 * (p.logsumexp(-1) ** 2).mean()

    table: list[Row] = [("three matrix products", f"{floor:.3f} ms", "", None)]
    row, memory = measured(
        "compose_linear", backward(composed, hidden, weight), floor, repeats=6, asked=1.15
    )
    eager, whole = measured(
        "with logits, eager", backward(with_logits, hidden, weight), floor, repeats=3
    )
    share = memory / whole if whole else 0.0
    table += [row, eager]
    table.append(
        ("compose_linear: memory of that with logits", f"{share:.3f}", "< 1/6", share < 1 / 6)
    )
    note = (
        "Cross-entropy, entropy and z-loss over `hidden @ weight.T`, with the gradients of both; "
        "the floor is the three matrix products that this takes."
    )
    return show(
        "Terms from hidden states on a GPU",
        f"Forward and backward, {tokens} × {features} hidden, {classes} classes, bfloat16",
        table,
        repeats="3 to 6",
        notes=[note],
    )


if __name__ == "__main__":
    main()
