"""Terms on a Ray cluster: one with a gradient, a judge without one, and one that hangs.

Without `ray.init(...)` and `RAY_ADDRESS` the first call starts a cluster on this machine, which
ends with the workers. Needs `steelyard[torch,ray]`.
"""

import time
from typing import Any

import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, Workers


def nll(data: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def spikes(data: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).var()


def judge(data: Any, logprobs: list[Tensor]) -> list[float]:
    return [float(len(text) > 12) for text in data]


def stuck(data: Any, logprobs: list[Tensor]) -> Tensor:
    time.sleep(600)
    return logprobs[0].sum()


def main() -> None:
    terms = [
        RegularizerSpec(spikes, 0.1, "spikes", run_in="ray"),
        RegularizerSpec(
            judge, 0.5, "judge", run_in="ray", gradient="score", resources={"num_cpus": 0.5}
        ),
        RegularizerSpec(stuck, 0.1, "stuck", run_in="ray", timeout=1.0, on_error="skip"),
    ]
    data = ["a short text", "a text that is longer"]
    logprobs = [torch.tensor([-0.1, -2.0, -0.7]), torch.tensor([-1.5, -0.3])]
    with Workers() as workers, Pipeline(nll, terms, workers=workers) as pipeline:
        output = pipeline.compute(data, logprobs)
    for name, term in output.regularizers.items():
        print(f"{name}: value {term.value:.3f}, contribution {term.contribution:.3f}")
    for name, reason in output.skipped.items():
        print(f"{name} was skipped: {reason}")


if __name__ == "__main__":
    main()
