"""Full-vocabulary terms on a GPU, beside eager torch, torch.compile, Liger-Kernel and the floor.

    PYTHONPATH=src python -m benchmarks.gpu          # 4096 × 128256 logits in bfloat16
    PYTHONPATH=src python -m benchmarks.gpu 512 8192 # rows and classes, to try it out

The floor is what memory alone takes, measured in the same run: each input read once, the gradient
written once. Times are medians of GPU time, with quartiles, forward and backward together.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from steelyard.penalties.from_logits import compose_linear, compose_logits

try:
    from liger_kernel.transformers.functional import liger_jsd, liger_kl_div
except ImportError:  # it is compared with where it is installed
    liger_jsd = liger_kl_div = None

Way = Callable[[], object]
FOUR: list[Any] = [
    "cross_entropy",
    ("entropy", {"weight": 0.01, "mode": "bonus"}),
    ("z_loss", {"weight": 1e-4}),
    ("kl", {"weight": 0.1, "direction": "reverse"}),
]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a GPU and a torch with CUDA.")
    sizes = [int(each) for each in sys.argv[1:]] or [4096, 128256]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "rows × classes", *sizes)
    terms(*sizes)
    linear(4 * sizes[0], sizes[1], 4096 if sizes[0] >= 4096 else 256)


def timed(way: Way, repeats: int = 20) -> tuple[float, float, float]:
    """Median and quartiles of milliseconds on the GPU; the queue is kept full."""
    for _ in range(3):
        way()
    event: Any = torch.cuda.Event  # without types, as `_sleep` and `backward`
    marks = [event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    sleep: Any = torch.cuda._sleep
    sleep(5_000_000)
    marks[0].record()
    for mark in marks[1:]:
        way()
        mark.record()
    torch.cuda.synchronize()
    spans = [a.elapsed_time(b) for a, b in pairwise(marks)]
    low, median, high = statistics.quantiles(spans, n=4)
    return median, low, high


def extra(way: Way) -> float:
    """Gigabytes at the peak beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def show(name: str, way: Way, floor: float, repeats: int = 20) -> None:
    try:
        memory = extra(way)
        median, low, high = timed(way, repeats)
    except torch.OutOfMemoryError:
        print(f"{name:42} out of memory", flush=True)
        return
    print(
        f"{name:42} {median:7.3f} ms  [{low:.3f}, {high:.3f}]  {median / floor:6.2f} × floor  "
        f"+{memory:.3f} GB",
        flush=True,
    )


def backward(loss: Callable[..., Any], *leaves: Tensor) -> Way:
    def way() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(loss(*leaves))

    return way


def floors(z: Tensor, q: Tensor) -> tuple[float, float]:
    """Milliseconds to read one input, or two, and write as much as one."""
    out = torch.empty_like(z)
    return timed(lambda: out.copy_(z))[0], timed(lambda: torch.add(z, q, out=out))[0]


def products(hidden: Tensor, weight: Tensor) -> float:
    """Milliseconds of the three matrix products that a linear layer and its loss need."""
    slopes = torch.randn(len(hidden), len(weight), device="cuda", dtype=hidden.dtype)
    logits = torch.empty_like(slopes)

    def three() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(slopes, weight)
        torch.mm(slopes.t(), hidden)

    return timed(three, 6)[0]


def terms(rows: int, classes: int) -> None:
    made = torch.Generator("cuda").manual_seed(0)
    z = 3 * torch.randn(rows, classes, device="cuda", generator=made)
    q = (z + torch.randn(rows, classes, device="cuda", generator=made)).bfloat16()
    z = z.bfloat16().requires_grad_()
    t = torch.randint(0, classes, (rows,), device="cuda", generator=made)
    one, two = floors(z.detach(), q)
    print(
        f"floor: one input {one:.3f} ms, two {two:.3f} ms; the gradient has {z.nbytes / 1e9:.3f} GB"
    )

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

    cases: list[tuple[str, Callable[[Tensor], Any], list[Any], float]] = [
        ("entropy", entropy, ["entropy"], one),
        ("forward KL", forward, ["kl"], two),
        ("reverse KL", reverse, [("kl", {"direction": "reverse"})], two),
        ("JS", js, ["js"], two),
        ("four together", four, FOUR, two),
    ]
    for name, formula, named, floor in cases:
        show(f"{name}: ours", backward(ours(named), z), floor)
        show(f"{name}: eager", backward(formula, z), floor, 4)
        show(f"{name}: torch.compile", backward(torch.compile(formula), z), floor, 8)
        torch._dynamo.reset()
    show("four together, tracked: ours", backward(ours(FOUR, tracked=True), z), two)
    if liger_kl_div is not None:
        b = q.float().log_softmax(-1)
        kl = lambda z: liger_kl_div(z.float().log_softmax(-1), b.exp())  # noqa: E731
        show("forward KL: Liger-Kernel, after log_softmax", backward(kl, z), two, 6)
        both = lambda z: liger_jsd(z.float().log_softmax(-1), b)  # noqa: E731
        show("JS: Liger-Kernel, after log_softmax", backward(both, z), two, 6)


def linear(tokens: int, classes: int, features: int) -> None:
    made = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(tokens, features, device="cuda", generator=made).bfloat16()
    weight = (torch.randn(classes, features, device="cuda", generator=made) / 64).bfloat16()
    targets = torch.randint(0, classes, (tokens,), device="cuda", generator=made)
    named: list[Any] = ["cross_entropy", FOUR[1], FOUR[2]]
    print(f"linear: {tokens} tokens, {features} features; cross-entropy, entropy, z-loss")
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

    print(f"{'three matrix products':42} {floor:7.3f} ms")
    show("compose_linear", backward(composed, hidden, weight), floor, 6)
    show("with logits, eager", backward(with_logits, hidden, weight), floor, 3)


if __name__ == "__main__":
    main()
