"""Sentences of the summary of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steelyard.experiment.page.formatting import (
    format_change,
    format_space,
    join_names,
    list_reasons,
    number,
    percent,
    seconds,
    skip_count,
    skip_reasons,
)
from steelyard.experiment.page.load import LoadedRun
from steelyard.experiment.page.plain_files import read_object
from steelyard.experiment.page.run_statistics import Change, RolloutStatistics, RunStatistics
from steelyard.output.redaction import redact
from steelyard.output.step_metrics import short_reason
from steelyard.spec.checks import is_finite

_MAX_RESULTS = 3  # in a headline


_MEANS = (
    "First and last values are means over a quarter of the steps at which they were measured; "
    "held-out values are single evaluations."
)


def headline(run: LoadedRun, stats: RunStatistics, baseline: str | None = None) -> str:
    """The one sentence about a run: its result, with and without its terms if that is known.

    Args:
        run: the run.
        stats: its statistics.
        baseline: sentence on the run with and without its terms.
    """
    if run.failure is not None and run.failure.get("failed"):
        reason = short_reason(str(run.failure.get("failed/reason", ""))).rstrip(".")
        return f"{_progress(stats)}: failed with {run.failure['failed']}, {reason}."
    if baseline is not None:
        return f"{_progress(stats)}. {baseline}"
    if stats.rollouts is not None:
        results = [("the reward", stats.rollouts.total), ("held-out", stats.rollouts.held_out)]
        if stats.rollouts.total is None:
            results = [(f"“{r.name}”", r.mean) for r in stats.rollouts.rewards][:_MAX_RESULTS]
    else:
        per_token = stats.per_token or stats.base.value
        name = "the base loss per token" if stats.per_token else "the base loss"
        results = [(name, per_token), ("held-out", stats.held_out)]
    moved = [f"{name} {_moved(change)}" for name, change in results if change is not None]
    return f"{_progress(stats)}{': ' if moved else ''}{', '.join(moved)}."


def summarize(stats: RunStatistics) -> list[str]:
    """Sentences about one run beside its headline: losses or rewards, and skipped terms."""
    sentences = _losses(stats) if stats.rollouts is None else _rewards(stats.rollouts)
    if not stats.terms:
        return [*sentences, "There were no regularizers."]
    for term in stats.skipping:
        reasons = skip_reasons(term)
        end = "" if reasons.endswith("…") else "."
        steps = f"{skip_count(term)} of {stats.steps} steps"
        sentences.append(f"“{term.name}” was skipped at {steps}: {reasons}{end}")
    sentences += [
        f"“{term.name}” went {format_change(term.value)}, with a bound of {number(term.bound)}: it "
        f"was {term.beyond} at {term.unmet} of {term.steps} steps."
        for term in stats.bounded
    ]
    if not stats.tracked:
        return [*sentences, "Gradient norms were not tracked: shares and cosines are unknown."]
    if stats.tracked < stats.steps:
        sentences.append(
            f"Gradient norms were tracked at {stats.tracked} of {stats.steps} steps, and shares "
            f"and cosines are those of these steps."
        )
    return [*sentences, *_gradient_sentences(stats), *([_MEANS] if stats.steps > 1 else [])]


def summarize_runs(runs: Sequence[LoadedRun], stats: Sequence[RunStatistics]) -> list[str]:
    """Sentences about several runs: how many, and which has the best held-out loss or reward.

    Held-out losses are compared only between runs with the same data and base loss, held-out
    rewards only between runs with the same prompts and rewards.
    """
    steps = sum(each.steps for each in stats)
    sentences = [f"{len(runs)} runs, {steps} steps in all."]
    rewards = [None if each.rollouts is None else each.rollouts.held_out for each in stats]
    return [
        *sentences,
        *_compared(runs, stats, [each.held_out for each in stats], _LOSSES),
        *_compared(runs, stats, rewards, _REWARDS),
    ]


@dataclass(frozen=True)
class _Compared:
    """A held-out quantity, and the sections of a config that it depends on, with their names."""

    name: str
    plural: str
    sections: Mapping[str, str]
    best: str
    worst: str


_LOSSES = _Compared(
    "loss", "losses", {"data": "data", "loss": "base losses"}, best="lowest", worst="highest"
)
_REWARDS = _Compared(
    "reward",
    "rewards",
    {"rollouts": "rollouts", "rewards": "rewards"},
    best="highest",
    worst="lowest",
)


def _compared(
    runs: Sequence[LoadedRun],
    stats: Sequence[RunStatistics],
    changes: Sequence[Change | None],
    quantity: _Compared,
) -> list[str]:
    measured = [
        (run, change.last, each.steps)
        for run, each, change in zip(runs, stats, changes, strict=True)
        if change is not None
    ]
    if len(measured) < 2:  # noqa: PLR2004 - one run has nothing to be compared with
        return []
    different = [
        name
        for section, name in quantity.sections.items()
        if any(run.settings(section) != measured[0][0].settings(section) for run, *_ in measured)
    ]
    if different:
        what = join_names(different)
        return [f"Their {what} differ, so held-out {quantity.plural} are not compared."]
    same_length = len({steps for *_, steps in measured}) == 1

    def describe(run: LoadedRun, value: float, steps: int) -> str:
        return f"“{run.name}” ({number(value)}{'' if same_length else f' after {steps} steps'})"

    lowest, highest = (pick(measured, key=lambda each: each[1]) for pick in (min, max))
    if lowest[1] == highest[1]:
        return [
            f"The held-out {quantity.name} ends at {number(lowest[1])} in each run that has it."
        ]
    best, worst = (lowest, highest) if quantity.best == "lowest" else (highest, lowest)
    ends = f"{quantity.best} in {describe(*best)} and {quantity.worst} in {describe(*worst)}"
    return [f"The held-out {quantity.name} ends {ends}."]


def _progress(stats: RunStatistics) -> str:
    steps = f"{stats.steps} step{'s' if stats.steps != 1 else ''}"
    if stats.planned is not None and stats.planned > stats.steps:
        steps = f"{stats.steps} of {stats.planned} steps"
    time = "" if stats.seconds is None else f" in {seconds(stats.seconds)}"
    return f"{steps}{time}"


def _losses(stats: RunStatistics) -> list[str]:
    """Sentence about the total loss where it is comparable."""
    sentences: list[str] = []
    if not stats.terms:
        return sentences
    if stats.loss is None:
        sentences.append(
            "The total loss is not compared: its terms or weights changed from step to step."
        )
        return sentences
    steps = f", over the {stats.loss.steps} steps with the same terms and weights,"
    total = f"The total loss{steps if stats.loss.steps < stats.steps else ''}"
    tokens = ""
    if stats.tokens is not None and stats.tokens[0] < stats.tokens[1]:
        tokens = "; its base is a sum over {:g} to {:g} tokens a batch".format(*stats.tokens)
    return [*sentences, f"{total} {_moved(stats.loss)}{tokens}."]


def _rewards(stats: RolloutStatistics) -> list[str]:
    """Sentences about the rewards, the answers that were dropped, and the groups without signal."""
    sentences = []
    if not stats.fixed_weights:
        sentences.append("The weights of the rewards changed, so their sum is not compared.")
    if stats.only_reward is None or len(stats.rewards) > 1:
        sentences += [
            f"“{reward.name}” {_moved(reward.mean)}."
            for reward in stats.rewards
            if reward.mean is not None
        ]
    sentences += _held_out_rewards(stats)
    sentences.append(_dropped(stats))
    if stats.no_signal:
        sentences.append(
            f"On average {percent(stats.no_signal)} of the groups of a step had no signal: their "
            f"answers had equal rewards, or too few were left to compare."
        )
    elif stats.no_signal is not None:
        sentences.append("Every group had a signal.")
    if stats.tokens is not None:
        cut = f"; on average {percent(stats.truncated)} were cut at the maximum length"
        sentences.append(
            f"The length of the answers went {format_change(stats.tokens)} tokens"
            f"{cut if stats.truncated else ''}."
        )
    return sentences


def _held_out_rewards(stats: RolloutStatistics) -> list[str]:
    if stats.held_out is not None:
        return [f"On held-out prompts the reward went {format_change(stats.held_out)}."]
    measured = [reward for reward in stats.rewards if reward.held_out is not None]
    if stats.fixed_weights or not measured:
        return []
    changes = join_names(f"“{each.name}” {format_change(each.held_out)}" for each in measured)
    return [f"On held-out prompts the rewards went: {changes}."]


def _dropped(stats: RolloutStatistics) -> str:
    if not stats.dropped:
        return "No answer was dropped."
    of = f" of {stats.answers}" if stats.answers else ""
    were = "answer was" if stats.dropped == 1 and not of else "answers were"
    reasons = list_reasons(stats.reasons) if stats.reasons else ""
    why = f": {reasons}" if reasons else ""
    return f"{stats.dropped}{of} {were} dropped{why}{'' if why.endswith('…') else '.'}"


def _moved(change: Change) -> str:
    difference = change.last - change.first
    if difference == 0:
        return f"stayed at {number(change.last)}"
    moved = f"{'fell' if difference < 0 else 'rose'} {format_change(change)}"
    relative = change.relative
    return moved if relative is None else f"{moved} ({percent(relative, signed=True)})"


def finding_sentences(stats: RunStatistics) -> list[str]:
    """Sentences of the doctor about the last step; what is information alone is in the table."""
    serious = [finding for finding in stats.lasting if finding.severity != "information"]
    if not serious:
        return ["The doctor has nothing to warn of."]
    return [f"{finding.severity.capitalize()}: {finding.text}" for finding in serious]


def _gradient_sentences(stats: RunStatistics) -> list[str]:
    sentences = []
    if stats.aggregated:
        sentences.append(
            "Norms, shares and cosines are those of the weighted gradients, before the factors of "
            "the aggregator."
        )
    elsewhere = [term for term in stats.terms if term.space not in (None, stats.base.space)]
    sentences += [
        f"The gradient of “{term.name}” is with respect to the {format_space(term.space)} and "
        f"not comparable with that of the base loss."
        for term in elsewhere
    ]
    return sentences


def run_history(folder: Path) -> list[str]:
    """Sentences on the best checkpoint and an early stop; files that are damaged say nothing."""
    sentences = []
    best = read_object(folder / "checkpoints" / "best.json")
    if isinstance(best.get("metric"), str) and all(
        map(is_finite, (best.get("step"), best.get("value")))
    ):
        sentences.append(
            f"The best checkpoint, after {best['step']} steps, has {best['metric']} "
            f"{number(best['value'])}."
        )
    stopped = read_object(folder / "result.json").get("stopped_early")
    if isinstance(stopped, str):
        sentences.append(f"{stopped[:1].upper()}{stopped[1:]}.")
    return redact(sentences)
