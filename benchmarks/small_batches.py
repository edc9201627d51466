"""Effect of demographic parity by batch size: the table in docs/regularizers.md.

Two groups have equally likely answers. Half of the questions of each group have one known answer,
half a random one, so that the likelihoods within a group are spread far more than those between
the groups. `python -m benchmarks.small_batches` takes minutes and prints the table.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.experiment import RunFolder, read_config, train

SEEDS, STEPS, BATCHES = 6, 80, (4, 16, 64)
TERMS: dict[str, tuple[float, dict[str, Any]]] = {
    "none": (0.0, {}),
    "squared": (1.0, {}),
    "unbiased": (1.0, {"unbiased": True}),
}


def spread(data: Sequence[Any], logprobs: Sequence[Tensor]) -> Tensor:
    """Variance of the data's mean log-probs within their groups, mean over the groups."""
    groups: dict[float, list[Tensor]] = {}
    for datum, own in zip(data, logprobs, strict=True):
        kept = own[datum.loss_fn_inputs["weights"].to_torch() != 0]
        label = datum.loss_fn_inputs["group"].to_torch().item()
        groups.setdefault(label, []).append(kept.mean())
    return torch.stack([torch.stack(each).var(correction=0) for each in groups.values()]).mean()


def write_lines(path: Path, count: int, generator: np.random.Generator) -> None:
    with path.open("w") as file:
        for index in range(count):
            known, group = generator.random() < 0.5, index % 2
            answer = "ok" if known else "".join(generator.choice(list("abcdefghijklmnop"), 4))
            question = f"{'please' if group else 'now'} {'a' if known else 'b'}"
            line = {"prompt": question, "completion": f" {answer}", "group": group}
            file.write(f"{json.dumps(line)}\n")


def trained(folder: Path, term: str, batch: int, seed: int) -> dict[str, Any]:
    weight, options = TERMS[term]
    parity = {"use": "demographic_parity", "weight": weight, "options": {"test": "none", **options}}
    gap = {"use": "demographic_parity", "weight": 0.0, "options": {"test": "none"}}
    config = read_config(
        {
            "model": {"base_model": "tiny-random", "rank": 8, "device": "cpu"},
            "data": {"path": "train.jsonl", "held_out": "held_out.jsonl", "max_length": 48},
            "loss": {"use": "cross_entropy"},
            "train": {
                "steps": STEPS,
                "batch_size": batch,
                "learning_rate": 3e-3,
                "seed": seed,
                "save_every": 0,
            },
            "regularizers": [
                {**parity, "name": "parity"},
                {**gap, "name": "gap"},
                {"use": "benchmarks.small_batches:spread", "name": "spread", "weight": 0.0},
            ],
        },
        folder=folder,
    )
    run = folder / f"{term}-{batch}-{seed}"
    train(config, run)
    rows = RunFolder(run).metrics()
    late = statistics.mean(row["regularizers/gap/value"] for row in rows[-STEPS // 4 :])
    return {**rows[-1], "batch gap": late}


def main() -> None:
    """Train with each batch size, term and seed, and print the table."""
    columns = ("batch", "term", "gap² in a batch", "held-out gap²", "of each seed",
               "held-out spread", "held-out loss")  # fmt: skip
    sys.stdout.write(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")
    with tempfile.TemporaryDirectory() as name:
        folder, generator = Path(name), np.random.default_rng(0)
        write_lines(folder / "train.jsonl", 600, generator)
        write_lines(folder / "held_out.jsonl", 300, generator)
        for batch in BATCHES:
            for term in TERMS:
                runs = [trained(folder, term, batch, seed) for seed in range(SEEDS)]
                gaps = [run["held_out/regularizers/gap"] for run in runs]
                means = [
                    statistics.mean(run[key] for run in runs)
                    for key in ("held_out/regularizers/spread", "held_out/loss")
                ]
                cells = (
                    str(batch),
                    term,
                    f"{statistics.mean(run['batch gap'] for run in runs):.2f}",
                    f"{statistics.mean(gaps):.3f}",
                    " ".join(f"{gap:.3f}" for gap in gaps),
                    *(f"{mean:.2f}" for mean in means),
                )
                sys.stdout.write(f"| {' | '.join(cells)} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
