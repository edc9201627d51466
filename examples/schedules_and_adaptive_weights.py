"""Changing weights: by a schedule, by hand, and by a controller that keeps a term at a target.

`Adaptive` raises the weight of a term while its value is above the target, and lowers it while
the value is below; the term is `KLToReference` on fixed data, half the squared log-ratio. Needs
`steelyard[torch]`.
"""

from typing import Any

import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, schedules
from steelyard.regularizers import Adaptive, KLToReference


def nll(data: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def confidence(data: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).exp().mean()


def main() -> None:
    reference = torch.full((12,), -2.0)
    data = [{"loss_fn_inputs": {"reference_logprobs": reference}}]
    terms = [
        RegularizerSpec(confidence, schedules.linear(0.0, 0.5, steps=60), "confidence"),
        RegularizerSpec(Adaptive(regularizer=KLToReference(), target=0.1, rate=0.1), 1.0, "kl"),
    ]
    row = reference.clone()
    with Pipeline(nll, terms) as pipeline:
        print("step  confidence: weight  value   kl: multiplier  observed")
        for step in range(121):
            if step == 100:
                pipeline.set_weight("confidence", 0.0)
            output = pipeline.compute(data, [row], step)
            row = (row - 1.0 * output.gradients[0]).clamp(max=0.0)
            if step % 20 == 0:
                soft, kl = output.regularizers["confidence"], output.regularizers["kl"]
                print(
                    f"{step:4d}  {soft.weight:18.3f}  {soft.value:5.3f}"
                    f"  {kl.custom['multiplier']:15.3f}  {kl.custom['observed']:8.3f}"
                )


if __name__ == "__main__":
    main()
