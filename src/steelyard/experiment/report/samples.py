"""What models answered to the same prompts, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steelyard.experiment.report.load import LoadedRun


@dataclass(frozen=True)
class Samples:
    """Answers by prompt.

    Attributes:
        headings: what the columns are.
        prompts: for each prompt its answers, by heading.
    """

    headings: Sequence[str]
    prompts: Mapping[str, Mapping[str, str]]


def paired(runs: Sequence[LoadedRun]) -> Samples:
    """The answers before and after; of several runs, before once and after for each.

    Runs of one model answer alike before training. Where they do not, each keeps its own
    "before".
    """
    alike = len({_before(run) for run in runs if run.samples}) <= 1
    headings: dict[str, None] = {}
    prompts: dict[str, dict[str, str]] = {}
    for run in runs:
        for sample in run.samples:
            when = str(sample.get("when", ""))
            shared = len(runs) == 1 or (alike and when == "before")
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
