"""Sentences of the summary of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steelyard.experiment.flags import DOMINATES, FIGHTS, NO_GRADIENT
from steelyard.experiment.report.change import Change
from steelyard.experiment.report.formatting import (
    cosine,
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
from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.metrics import Findings
from steelyard.experiment.report.reward_metrics import RolloutFindings


def summarize(found: Findings) -> list[str]:
    """Sentences about one run: its losses or rewards, skipped terms, and flagged terms."""
    results = _losses(found) if found.rollouts is None else _rewards(found.rollouts)
    sentences = [_progress(found), *results]
    if not found.terms:
        return [*sentences, "There were no regularizers."]
    for term in found.skipping:
        reasons = skip_reasons(term)
        end = "" if reasons.endswith("…") else "."
        steps = f"{skip_count(term)} of {found.steps} steps"
        sentences.append(f"“{term.name}” was skipped at {steps}: {reasons}{end}")
    sentences += [
        f"“{term.name}” went {format_change(term.value)}, with a bound of {number(term.bound)}: it "
        f"was beyond it{' by more than 5 %' if term.bound else ''} at {term.unmet} of {term.steps} "
        f"steps."
        for term in found.bounded
    ]
    if not found.tracked:
        return [*sentences, "Gradient norms were not tracked: shares and cosines are unknown."]
    if found.tracked < found.steps:
        sentences.append(
            f"Gradient norms were tracked at {found.tracked} of {found.steps} steps, and shares "
            f"and cosines are those of these steps."
        )
    return [*sentences, *_gradient_sentences(found)]


def summarize_runs(runs: Sequence[LoadedRun], found: Sequence[Findings]) -> list[str]:
    """Sentences about several runs: how many, and which has the best held-out loss or reward.

    Held-out losses are compared only between runs with the same data and base loss, held-out
    rewards only between runs with the same prompts and rewards.
    """
    steps = sum(each.steps for each in found)
    sentences = [f"{len(runs)} runs, {steps} steps in all."]
    rewards = [None if each.rollouts is None else each.rollouts.held_out for each in found]
    return [
        *sentences,
        *_compared(runs, found, [each.held_out for each in found], _LOSSES),
        *_compared(runs, found, rewards, _REWARDS),
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
    found: Sequence[Findings],
    changes: Sequence[Change | None],
    quantity: _Compared,
) -> list[str]:
    measured = [
        (run, change.last, each.steps)
        for run, each, change in zip(runs, found, changes, strict=True)
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


def _progress(found: Findings) -> str:
    steps = f"{found.steps} step{'s' if found.steps != 1 else ''}"
    if found.planned is not None and found.planned > found.steps:
        steps = f"{found.steps} of {found.planned} steps"
    time = "" if found.seconds is None else f" in {seconds(found.seconds)}"
    return f"{steps}{time}."


def _losses(found: Findings) -> list[str]:
    """Sentences about the base loss, the held-out loss, and the total where it is comparable."""
    sentences = []
    if found.per_token is not None:
        sentences.append(f"The base loss per token {_moved(found.per_token)}.")
    elif found.base.value is not None:
        sentences.append(f"The base loss {_moved(found.base.value)}.")
    if found.held_out is not None:
        sentences.append(f"On held-out data the loss went {format_change(found.held_out)}.")
    if not found.terms:
        return sentences
    if found.loss is None:
        sentences.append(
            "The total loss is not compared: its terms or weights changed from step to step."
        )
        return sentences
    steps = f", over the {found.loss.steps} steps with the same terms and weights,"
    total = f"The total loss{steps if found.loss.steps < found.steps else ''}"
    tokens = ""
    if found.tokens is not None and found.tokens[0] < found.tokens[1]:
        tokens = "; its base is a sum over {:g} to {:g} tokens a batch".format(*found.tokens)
    return [*sentences, f"{total} {_moved(found.loss)}{tokens}."]


def _rewards(found: RolloutFindings) -> list[str]:
    """Sentences about the rewards, the answers that were dropped, and the groups without signal."""
    sentences = []
    if found.total is not None:
        sentences.append(f"The reward {_moved(found.total)}.")
    elif not found.fixed_weights:
        sentences.append("The weights of the rewards changed, so their sum is not compared.")
    if found.only_reward is None or len(found.rewards) > 1:
        sentences += [
            f"“{reward.name}” {_moved(reward.mean)}."
            for reward in found.rewards
            if reward.mean is not None
        ]
    sentences += _held_out_rewards(found)
    sentences.append(_dropped(found))
    if found.no_signal:
        sentences.append(
            f"On average {percent(found.no_signal)} of the groups of a step had no signal: their "
            f"answers had equal rewards, or too few were left to compare."
        )
    elif found.no_signal is not None:
        sentences.append("Every group had a signal.")
    if found.tokens is not None:
        cut = f"; on average {percent(found.truncated)} were cut at the maximum length"
        sentences.append(
            f"The length of the answers went {format_change(found.tokens)} tokens"
            f"{cut if found.truncated else ''}."
        )
    return sentences


def _held_out_rewards(found: RolloutFindings) -> list[str]:
    if found.held_out is not None:
        return [f"On held-out prompts the reward went {format_change(found.held_out)}."]
    measured = [reward for reward in found.rewards if reward.held_out is not None]
    if found.fixed_weights or not measured:
        return []
    changes = join_names(f"“{each.name}” {format_change(each.held_out)}" for each in measured)
    return [f"On held-out prompts the rewards went: {changes}."]


def _dropped(found: RolloutFindings) -> str:
    if not found.dropped:
        return "No answer was dropped."
    of = f" of {found.answers}" if found.answers else ""
    were = "answer was" if found.dropped == 1 and not of else "answers were"
    reasons = list_reasons(found.reasons) if found.reasons else ""
    why = f": {reasons}" if reasons else ""
    return f"{found.dropped}{of} {were} dropped{why}{'' if why.endswith('…') else '.'}"


def _moved(change: Change) -> str:
    difference = change.last - change.first
    if difference == 0:
        return f"stayed at {number(change.last)}"
    moved = f"{'fell' if difference < 0 else 'rose'} {format_change(change)}"
    relative = change.relative
    details = [] if relative is None else [percent(relative, signed=True)]
    if change.over > 1:
        details.append(f"means of the first and last {change.over} of these steps")
    return f"{moved} ({', '.join(details)})" if details else moved


def _gradient_sentences(found: Findings) -> list[str]:
    sentences = [
        f"“{term.name}” dominates: it has {percent(term.share)} of the sum of the gradient norms "
        f"with respect to the {format_space(term.space)}."
        for term in found.flagged(DOMINATES)
    ]
    sentences += [
        f"With respect to the {format_space(term.space)}, the gradient of “{term.name}” opposes "
        f"that of the base loss (cosine {cosine(term.cosine)}) and cancels "
        f"{percent(term.cancelled)} of it."
        for term in found.flagged(FIGHTS)
    ]
    without_gradient = found.flagged(NO_GRADIENT)
    if without_gradient:
        names = join_names(f"“{term.name}”" for term in without_gradient)
        has = "has" if len(without_gradient) == 1 else "have"
        sentences.append(f"{names} {has} no gradient: measured, but without effect on training.")
    if not any(term.flags for term in found.terms):
        sentences.append("No term dominates, and none fights the base loss.")
    if found.aggregated:
        sentences.append(
            "Norms, shares and cosines are those of the weighted gradients, before the factors of "
            "the aggregator."
        )
    elsewhere = [term for term in found.terms if term.space not in (None, found.base.space)]
    sentences += [
        f"The gradient of “{term.name}” is with respect to the {format_space(term.space)} and "
        f"not comparable with that of the base loss."
        for term in elsewhere
    ]
    return sentences
