"""Cost of transforms in an optimizer step: AdamW (foreach) on 100 million float32 parameters.

    python -m benchmarks.optim [--repeats 7] [--device cpu] [--layers 12]

A step is limited by moving arrays of 400 MB between memory and processor, so the labels count
these transfers: AdamW's own foreach step makes about 20, and one is 5 % of it. A transform cannot
cost less than the arrays that it has to read and write.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch
from torch.nn import Parameter
from torch.optim import AdamW

from benchmarks.measure import Row, against, in_turn, show
from steelyard.integrations import optim
from steelyard.integrations.optim import Transform

TARGET = 1.10


def parameters(layers: int, device: str) -> list[Parameter]:
    """Parameters of a GPT of width 768; 12 layers have 100.4 million in 121 tensors."""
    block: list[tuple[int, ...]] = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    block += [(2304,), (768,), (3072,), (768,), (768,), (768,)]
    shapes = [(20_000, 768), *(shape for _ in range(layers) for shape in block)]
    made = []
    for shape in shapes:
        one = Parameter(0.02 * torch.randn(shape, device=device))
        one.grad = 1e-3 * torch.randn(shape, device=device)
        made.append(one)
    return made


def falling(start: float) -> Callable[[int], float]:
    """Threshold that falls at each call, so that gradients clipped in place are clipped again."""
    calls = itertools.count(1)
    return lambda _: start * 0.98 ** next(calls)


def cases(norm: float) -> dict[str, tuple[list[Transform], str]]:
    """Transforms, and how many arrays of the size of the model each must read and write."""
    everything = [
        optim.centralize(),
        optim.adaptive_clip(1e3),
        optim.clip_by_global_norm(1e9),
        optim.elastic_net_decay(1e-6, 0.5, decoupled=True),
        optim.gradient_noise(1e-12),
    ]
    return {
        "l2_decay": ([optim.l2_decay(1e-6)], "2 read, 1 written"),
        "l2_decay, decoupled": ([optim.l2_decay(1e-6, decoupled=True)], "1 read, 1 written"),
        "l1_decay": ([optim.l1_decay(1e-6)], "2 read, 1 written"),
        "elastic_net_decay": ([optim.elastic_net_decay(1e-6)], "2 read, 1 written"),
        "clip_by_global_norm, below it": ([optim.clip_by_global_norm(1e9)], "1 read"),
        "clip_by_global_norm, above it": (
            [optim.clip_by_global_norm(falling(norm))],
            "2 read, 1 written",
        ),
        "clip_by_global_norm, unchecked": (
            [optim.clip_by_global_norm(1e9, check_finite=False)],
            "2 read, 1 written",
        ),
        "adaptive_clip, below it": ([optim.adaptive_clip(1e3)], "2 read"),
        "adaptive_clip, above it": ([optim.adaptive_clip(falling(0.05))], "3 read, 1 written"),
        "centralize": ([optim.centralize()], "2 read, 1 written"),
        "gradient_noise": ([optim.gradient_noise(1e-12)], "1 read, 1 written; 100 M draws"),
        "five of them": (everything, "8 read, 3 written; 100 M draws"),
    }


def stepping(optimizer: AdamW, finish: Callable[[], object]) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        finish()

    return step


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Transforms against the plain step.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    tensors = parameters(given.layers, given.device)
    count = sum(tensor.numel() for tensor in tensors)
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(tensor.grad) for tensor in tensors])
    ).item()
    optimizer = AdamW(tensors, lr=1e-6, foreach=True)
    on_cpu = torch.device(given.device).type == "cpu"
    step = stepping(optimizer, (lambda: None) if on_cpu else torch.accelerator.synchronize)
    rows: list[Row] = []
    for name, (transforms, moved) in cases(norm).items():

        def with_transforms(transforms: list[Transform] = transforms) -> None:
            with optim.attach(optimizer, transforms):
                step()

        timing = in_turn({"plain": step, "ours": with_transforms}, repeats=given.repeats, warmup=1)[
            "ours"
        ]
        rows.append(against(f"{name} ({moved})", timing, TARGET))
    show(
        "Optimizer transforms",
        f"AdamW's step with a transform, against the plain step, {count / 1e6:.0f} M parameters",
        rows,
        repeats=str(given.repeats),
    )


if __name__ == "__main__":
    main()
