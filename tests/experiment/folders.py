"""Run folders for tests of reports, with metrics from a real pipeline on a few log-probs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, schedules
from steelyard.output.step_metrics import skip_reasons, space_metrics

DATA = [{"bad": 0.0}, {"bad": 1.0}, {"bad": 0.0}, {"bad": 0.0}]
START = 1_790_000_000.0


def nll(data: Any, logprobs: list[Tensor]) -> Tensor:
    return -torch.cat(logprobs).mean()


def confidence(data: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.cat(logprobs).exp().mean()


def evenness(data: Any, logprobs: list[Tensor]) -> Tensor:
    return torch.stack([each.mean() for each in logprobs]).var()


def judge(data: Any, logprobs: list[Tensor]) -> list[float]:
    return [datum["bad"] for datum in data]


def length(data: Any, logprobs: list[Tensor]) -> float:
    return float(len(data))


def flaky(*failures: str | None, name: str = "flaky") -> RegularizerSpec:
    """Make a term that raises these messages, one a step, and is skipped; None does not raise."""
    remaining = iter(failures)

    def compute(data: Any, logprobs: list[Tensor]) -> Tensor:
        failure = next(remaining)
        if failure is not None:
            raise OSError(failure)
        return torch.cat(logprobs).square().mean()

    return RegularizerSpec(compute, 0.1, name, on_error="skip", run_in="inline")


def specs() -> list[RegularizerSpec]:
    return [
        RegularizerSpec(evenness, schedules.warmup(0.4, steps=5), "evenness", run_in="inline"),
        RegularizerSpec(confidence, 1.6, "confidence", run_in="inline"),
        RegularizerSpec(judge, 0.05, "judge", gradient="score", every=2, run_in="inline"),
        RegularizerSpec(length, 0.01, "length", gradient="none", run_in="inline"),
    ]


def config(terms: Sequence[RegularizerSpec], steps: int) -> dict[str, Any]:
    return {
        "model": {"backend": "local", "base_model": "tiny-random", "rank": 16},
        "data": {"path": "train.jsonl", "max_length": 64},
        "train": {"steps": steps, "batch_size": 4, "learning_rate": 1e-4, "seed": 0},
        "loss": {"use": "cross_entropy"},
        "regularizers": [
            {"use": f"tests:{term.name}", "name": term.name, "options": {}} for term in terms
        ],
    }


def metrics(terms: Sequence[RegularizerSpec], steps: int, *, tracked: bool) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    logprobs = [-3 * torch.rand(6, generator=generator) for _ in DATA]
    rows = []
    with Pipeline(nll, terms, track_grad_norms=tracked) as pipeline:
        for step in range(steps):
            output = pipeline.compute(DATA, logprobs, step=step)
            times = {"step": step, "time": START + step, "seconds": 0.25 + 0.01 * step}
            texts = space_metrics(output) | skip_reasons(output.skipped)
            rows.append(times | output.metrics | texts)
            if step % 4 == 0 or step == steps - 1:
                rows[-1]["held_out/loss"] = output.base_loss.value + 0.1
            logprobs = [
                (each - 0.6 * gradient).clamp_max(-1e-3)
                for each, gradient in zip(logprobs, output.gradients, strict=True)
            ]
    return rows


def write_run(
    folder: Path,
    *,
    terms: Sequence[RegularizerSpec] | None = None,
    steps: int = 12,
    tracked: bool = True,
    samples: Sequence[Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Write a run folder, and return the rows of its metrics."""
    terms = specs() if terms is None else terms
    rows = metrics(terms, steps, tracked=tracked)
    if samples is None:
        samples = [
            {"when": when, "step": step, "prompt": prompt, "completion": f"{answer} ({when})"}
            for when, step in (("before", 0), ("after", steps))
            for prompt, answer in (("The capital of France is", "Paris."), ("2 + 2 =", "4"))
        ]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(terms, steps)), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "samples.jsonl", samples)
    return rows


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def write_ablation(folder: Path, seeds: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Write the folder of an ablation, and return the rows of each run, by the run's label.

    The rows are those of the first seed; each further seed adds 0.1 to the held-out losses.
    """
    names = [term.name for term in specs() if term.name]
    runs: dict[str, list[str]] = {"all": names, "none": []}
    runs |= {f"without {name}": [other for other in names if other != name] for name in names}
    subfolders = {name: name.replace(" ", "-") for name in runs}
    rows = {
        name: write_run(
            folder / subfolders[name], terms=[each for each in specs() if each.name in kept]
        )
        for name, kept in runs.items()
    }
    found: dict[str, Any] = {"runs": subfolders, "table": []}
    if seeds > 1:
        found["seeds"] = {"0": subfolders}
    for seed in range(1, seeds):
        found["seeds"][str(seed)] = {n: f"seed-{seed}/{sub}" for n, sub in subfolders.items()}
        for name, subfolder in subfolders.items():
            target = folder / f"seed-{seed}" / subfolder
            shutil.copytree(folder / subfolder, target)
            write_lines(
                target / "metrics.jsonl",
                [
                    {
                        key: value + 0.1 * seed if key == "held_out/loss" else value
                        for key, value in row.items()
                    }
                    for row in rows[name]
                ],
            )
    (folder / "ablation.json").write_text(json.dumps(found), encoding="utf-8")
    return rows
