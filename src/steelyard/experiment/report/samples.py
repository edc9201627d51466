"""Samples of the models for the same prompts, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steelyard.experiment.report.load import LoadedRun


@dataclass(frozen=True)
class Samples:
    """Completions by prompt.

    Attributes:
        headings: headings of the columns, such as "before" and "after".
        prompts: completions of each prompt, by heading.
    """

    headings: Sequence[str]
    prompts: Mapping[str, Mapping[str, str]]


def collect_samples(runs: Sequence[LoadedRun]) -> Samples:
    """Collect the completions before and after training, with one column each.

    For several runs there is one column "after" per run. Runs of the same model have the same
    completions before training and share the column "before"; where they differ, each run has its
    own.
    """
    same_start = len({_before(run) for run in runs if run.samples}) <= 1
    headings: dict[str, None] = {}
    prompts: dict[str, dict[str, str]] = {}
    for run in runs:
        for sample in run.samples:
            when = str(sample.get("when", ""))
            shared = len(runs) == 1 or (same_start and when == "before")
            heading = when if shared else f"{when} · {run.name}"
            headings.setdefault(heading)
            prompts.setdefault(str(sample["prompt"]), {})[heading] = str(
                sample.get("completion", "")
            )
    return Samples(list(headings), prompts)


def _before(run: LoadedRun) -> frozenset[tuple[str, str]]:
    return frozenset(
        (str(sample["prompt"]), str(sample.get("completion", "")))
        for sample in run.samples
        if sample.get("when") == "before"
    )
