"""Demographic parity: two groups should get the same mean log-prob.

The base loss favours group 0; the term reduces the gap. Needs `steelyard[fairness]`.
"""

from typing import Any

import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.regularizers import DemographicParity

GROUPS = 8 * [0] + 8 * [1]


def favours(data: Any, logprobs: list[Tensor]) -> Tensor:
    weights = torch.tensor(
        [1.0 if datum["loss_fn_inputs"]["group"] == 0 else 0.2 for datum in data]
    )
    return -(weights * torch.stack([row.mean() for row in logprobs])).mean()


def trained(weight: float) -> tuple[float, float]:
    """Mean log-probs of both groups after training with this weight."""
    data = [{"loss_fn_inputs": {"group": group}} for group in GROUPS]
    rows = [torch.full((5,), -2.0) for _ in GROUPS]
    spec = RegularizerSpec(DemographicParity(group="group"), weight, "parity")
    with Pipeline(favours, [spec]) as pipeline:
        for step in range(60):
            gradients = pipeline.compute(data, rows, step).gradients
            rows = [
                (row - len(data) / 3 * gradient).clamp(max=0.0)
                for row, gradient in zip(rows, gradients, strict=True)
            ]
    means = [
        torch.cat([row for row, g in zip(rows, GROUPS, strict=True) if g == group]).mean().item()
        for group in (0, 1)
    ]
    return means[0], means[1]


def main() -> None:
    print("weight  group 0  group 1    gap")
    for weight in (0.0, 0.1, 0.5):
        first, second = trained(weight)
        print(f"{weight:6.1f}  {first:7.3f}  {second:7.3f}  {first - second:5.3f}")


if __name__ == "__main__":
    main()
