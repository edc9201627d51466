"""Memory of one more regularizer in the parent process, without its gradient."""

from __future__ import annotations

import gc

import psutil
import torch

from benchmarks.composition import DATA, TOKENS, base, entropy
from benchmarks.measure import Row, show
from steelyard import Pipeline, RegularizerSpec

TERMS, ROUNDS = 50, 3


def resident() -> float:
    """Resident memory of this process in megabytes."""
    gc.collect()
    used: int = psutil.Process().memory_info().rss
    return used / 1e6


def megabytes_per_term(run_in: str) -> float:
    """Memory per term: growth from a pipeline of one term to one of 50, with the output kept."""
    logprobs = [-torch.randn(TOKENS).abs() for _ in range(DATA)]
    data = [torch.rand(TOKENS) for _ in range(DATA)]

    def run(terms: int) -> tuple[Pipeline, object, float]:
        fields = {"fn": entropy, "weight": 0.1, "run_in": run_in}
        specs = [RegularizerSpec.from_dict({**fields, "name": f"t{i}"}) for i in range(terms)]
        pipeline = Pipeline(base, specs, track_grad_norms=True)
        for _ in range(3):
            output = pipeline.compute(data, logprobs)
        return pipeline, output, resident()

    one = run(1)
    many = run(TERMS)
    gradient = DATA * TOKENS * 4 / 1e6
    return max(0.0, (many[2] - one[2]) / (TERMS - 1) - gradient)


def main() -> None:
    """Measure and print."""
    rows: list[Row] = []
    for run_in in ("inline", "thread", "process"):
        extra = sorted(megabytes_per_term(run_in) for _ in range(ROUNDS))
        measured = f"{extra[ROUNDS // 2]:.2f} MB ({extra[0]:.2f} to {extra[-1]:.2f})"
        rows.append((f"per {run_in} term", measured, "< 10 MB", extra[ROUNDS // 2] < 10))
    show(
        "Memory",
        f"One more regularizer, without its gradient, {DATA} data × {TOKENS} tokens, tracked; "
        f"least to most",
        rows,
        repeats=str(ROUNDS),
    )


if __name__ == "__main__":
    main()
