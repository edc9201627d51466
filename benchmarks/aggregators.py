"""What aggregators do to a base loss and an anchor: train with each, and draw docs/aggregators.svg.

Not a measurement of time, and so not part of `make bench`: run `python -m benchmarks.aggregators`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tinker import types

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient
from steelyard.regularizers import KLToReference

PLOT = Path(__file__).parents[1] / "docs" / "aggregators.svg"
STEPS = 60
COLOURS = {"sum": "#3f51b5", "upgrad": "#c2185b", "pcgrad": "#00796b", "mgda": "#8d6e63"}


def train(aggregate: str) -> tuple[list[float], float]:
    """NLL per token at each step, and the term at the end, of an overfitted tiny model."""
    training = LocalServiceClient().create_lora_training_client("tiny-random", rank=8, seed=0)
    tokens = torch.randint(0, 500, (4, 17), generator=torch.Generator().manual_seed(0)).tolist()
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:]},
        )
        for row in tokens
    ]
    before = training.forward(data, "cross_entropy").result().loss_fn_outputs
    for datum, found in zip(data, before, strict=True):
        datum.loss_fn_inputs["reference_logprobs"] = found["logprobs"]
    kl = RegularizerSpec(KLToReference(), 3.0, "kl")
    client = regularize(training, [kl], aggregate=aggregate)
    losses: list[float] = []
    output: Any = None
    for _ in range(STEPS):
        output = client.forward_backward(data, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(output.base_loss.value / 64)
    return losses, output.regularizers["kl"].value


def plot(lines: Mapping[str, Sequence[float]]) -> str:
    """Line chart of the losses over the steps."""
    width, height, edge = 640, 320, 50
    top = max(max(line) for line in lines.values())

    def at(step: int, loss: float) -> str:
        across = edge + (width - 3 * edge) * step / (STEPS - 1)
        return f"{across:.1f},{height - edge - (height - 2 * edge) * loss / top:.1f}"

    low, end = height - edge, width - 2 * edge
    parts = [
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M {edge} {edge} V {low} H {end}" fill="none" stroke="#888"/>',
        f'<text x="{end}" y="{low + 18}" text-anchor="end" fill="#888">step {STEPS}</text>',
        f'<text x="{edge}" y="{edge - 12}" fill="#888">NLL per token, from {top:.2f}</text>',
    ]
    for name, line in lines.items():
        points = " ".join(at(step, loss) for step, loss in enumerate(line))
        x, y = at(len(line) - 1, line[-1]).split(",")
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>',
            f'<text x="{x}" y="{y}" dx="8" fill="{COLOURS[name]}">{name} {line[-1]:.2f}</text>',
        ]
    shape = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>', *parts, "</svg>\n"])


def main() -> None:
    """Train, print and draw."""
    lines = {}
    for name in COLOURS:
        lines[name], kl = train(name)
        print(f"{name:8} NLL {lines[name][-1]:.2f}  half squared log-ratio {kl:.2f}")
    PLOT.write_text(plot(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
