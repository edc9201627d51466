"""Logical constraints, checked by Z3: answers that contradict arithmetic become less likely.

Each datum states a sum, and the constraint requires that it is correct. The result of Z3 has no
gradient, so a score-function estimate is used. Needs `steelyard[logic]`.
"""

from typing import Any

import torch
import z3
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.regularizers import LogicalConsistency

CLAIMS = [(1, 2, 3), (2, 2, 5), (4, 4, 8), (7, 1, 9)]


def adds_up(datum: Any, index: int) -> Any:
    a, b, c = (z3.IntVal(number) for number in datum["claim"])
    return a + b == c


def none(data: Any, logprobs: list[Tensor]) -> Tensor:
    return 0 * torch.cat(logprobs).sum()


def main() -> None:
    judge = LogicalConsistency(constraints=adds_up)
    data = [{"claim": claim} for claim in CLAIMS]
    scores = torch.zeros(len(CLAIMS))
    with Pipeline(none, [RegularizerSpec(judge, 1.0, "logic")]) as pipeline:
        for step in range(21):
            logprobs = scores.log_softmax(0)
            output = pipeline.compute(data, [row.reshape(1) for row in logprobs], step)
            gradient = torch.cat(output.gradients)
            scores -= gradient - logprobs.exp() * gradient.sum()  # backward through log_softmax
            if step % 10 == 0:
                said = ", ".join(
                    f"{a}+{b}={c}: {p:.2f}"
                    for (a, b, c), p in zip(CLAIMS, logprobs.exp().tolist(), strict=True)
                )
                print(f"step {step:2d}  {output.regularizers['logic'].custom}  {said}")


if __name__ == "__main__":
    main()
