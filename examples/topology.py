"""Persistent homology as a term: it moves points made of log-probs closer together.

Each log-prob and the next one are the coordinates of a point. Total persistence in dimension 0 is
the length of the minimum spanning tree of the points. The term runs in a process. Needs
`steelyard[topology]`.
"""

from typing import Any

import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.regularizers import TopologicalConsistency


def delays(datum: Any, logprobs: Tensor) -> Tensor:
    return logprobs.unfold(0, 2, 1)


def nll(data: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def main() -> None:
    shape = TopologicalConsistency(points=delays, dimensions=0)
    torch.manual_seed(0)
    rows = [-2 * torch.rand(24) for _ in range(4)]
    with Pipeline(
        nll, [RegularizerSpec(shape, 0.05, "topology")], track_grad_norms=True
    ) as pipeline:
        for step in range(41):
            output = pipeline.compute([None] * len(rows), rows, step)
            if step % 20 == 0:
                term = output.regularizers["topology"]
                print(
                    f"step {step:2d}  nll {output.base_loss.value:.3f}"
                    f"  persistence {term.value:6.3f}  grad norm {term.grad_norm:.3f}"
                    f"  cosine {output.cosines['base', 'topology']:+.2f}"
                )
            rows = [
                (row - 0.2 * gradient).clamp(max=0.0)
                for row, gradient in zip(rows, output.gradients, strict=True)
            ]


if __name__ == "__main__":
    main()
