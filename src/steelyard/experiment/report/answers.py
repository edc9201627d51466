"""Best and worst answers of an on-policy run, and its answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.errors import RunError
from steelyard.experiment.report.load import ROLLOUTS, LoadedRun

_MAX_STEPS = 6  # of best and worst answers: the first, the last, and some between
_MAX_PROMPTS = 8  # held-out prompts
_MAX_CHARACTERS = 600  # of a prompt or an answer


@dataclass(frozen=True)
class ShownAnswer:
    """One answer.

    Attributes:
        text: the answer, shortened; empty if it is.
        reward: weighted sum of its rewards.
        rewards: each of its rewards; None where it failed.
    """

    text: str
    reward: float
    rewards: Mapping[str, float | None]


@dataclass(frozen=True)
class Extremes:
    """Best and worst answer of one step, to the prompt whose answers differ the most.

    Attributes:
        step: number of the step.
        prompt: text of the prompt, shortened.
        best: answer with the highest reward.
        worst: answer with the lowest one.
    """

    step: int
    prompt: str
    best: ShownAnswer
    worst: ShownAnswer


@dataclass(frozen=True)
class HeldOutAnswers:
    """Answers to a held-out prompt.

    Attributes:
        prompt: text of the prompt, shortened.
        before: answer at the first evaluation, before any update; None if there was only one.
        after: answer at the last evaluation.
    """

    prompt: str
    before: ShownAnswer | None
    after: ShownAnswer


@dataclass(frozen=True)
class Answers:
    """Answers that the report shows.

    Attributes:
        extremes: best and worst answers over time.
        held_out: answers to held-out prompts.
        sampled: whether the held-out answers were sampled; the first of each group is shown.
    """

    extremes: Sequence[Extremes] = ()
    held_out: Sequence[HeldOutAnswers] = ()
    sampled: bool = False


def collect_answers(run: LoadedRun) -> Answers:
    """Collect the answers to show; empty for a run without rollouts.

    Raises:
        RunError: a record is not as a run writes it.
    """
    try:
        settings = run.config.get("rollouts") or {}
        sampled = settings.get("evaluate") == "sampled"
        return Answers(_extremes(run.rollouts), _held_out(run.rollouts), sampled)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{run.folder / ROLLOUTS} must hold records as a run writes them, and one is damaged: "
            f"{type(error).__name__}: {error}. Remove it, and the report leaves them out."
        ) from error


def _extremes(records: Sequence[Mapping[str, Any]]) -> list[Extremes]:
    by_step: dict[int, dict[int, list[Mapping[str, Any]]]] = {}
    for record in records:
        if not record.get("held_out") and record["reward"] is not None:
            groups = by_step.setdefault(record["step"], {})
            groups.setdefault(record["group"], []).append(record)
    return [_of_step(step, by_step[step]) for step in _spread(sorted(by_step))]


def _of_step(step: int, groups: Mapping[int, Sequence[Mapping[str, Any]]]) -> Extremes:
    """Extremes of the group with the widest range of rewards: of one prompt, to be comparable."""
    pairs = [(min(group, key=_reward), max(group, key=_reward)) for group in groups.values()]
    worst, best = max(pairs, key=lambda pair: _reward(pair[1]) - _reward(pair[0]))
    return Extremes(step, prompt_text(best["prompt"]), _shown(best), _shown(worst))


def _held_out(records: Sequence[Mapping[str, Any]]) -> list[HeldOutAnswers]:
    by_line: dict[int, dict[int, Mapping[str, Any]]] = {}
    for record in records:
        if record.get("held_out") and record["reward"] is not None:
            # Of a group of sampled answers the first one.
            by_line.setdefault(record["line"], {}).setdefault(record["step"], record)
    steps = sorted({step for own in by_line.values() for step in own})
    if not steps:
        return []
    first, last = steps[0], steps[-1]
    return [
        HeldOutAnswers(
            prompt_text(own[last]["prompt"]),
            _shown(own[first]) if first in own and first < last else None,
            _shown(own[last]),
        )
        for own in by_line.values()
        if last in own
    ][:_MAX_PROMPTS]


def prompt_text(prompt: Any) -> str:
    r"""Text of a prompt, shortened; of a chat each message with its role.

    Example:
        >>> prompt_text([{"role": "system", "content": "Be kind."}, {"role": "user"}])
        'system: Be kind.\nuser: '
    """
    if isinstance(prompt, list):
        messages = (f"{each.get('role', '')}: {each.get('content', '')}" for each in prompt)
        return _shortened("\n".join(messages))
    return _shortened(str(prompt))


def _shown(record: Mapping[str, Any]) -> ShownAnswer:
    return ShownAnswer(_shortened(record["answer"]), record["reward"], dict(record["rewards"]))


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["reward"])


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS].rstrip()} …"


def _spread(steps: Sequence[int]) -> list[int]:
    """At most so many steps, evenly spread, the first and the last included."""
    if len(steps) <= _MAX_STEPS:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(index * last / (_MAX_STEPS - 1))] for index in range(_MAX_STEPS)]
