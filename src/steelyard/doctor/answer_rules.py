"""Rules about on-policy runs: rewards, groups and answers, entropy, importance ratios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.doctor.finding import Severity
from steelyard.doctor.observation import Memory, Observation, RewardStep
from steelyard.doctor.rule import Diagnosis, Judgements, percent, rule
from steelyard.spec.error_messages import title

_SILENT, _HEARD, _WINDOW = 0.8, 0.6, 5
_FIRST_ANSWERS = 32
_SATURATED, _UNSATURATED = 0.9, 0.8  # of the highest reward
_TRUNCATED = 0.5
_COLLAPSED = 0.1  # of the entropy of the first steps
_RATIO, _CLIPPED = 0.1, 0.05  # distance of the mean ratio from 1, and fraction clipped
_CONSTANT = 0.02  # standard deviation, as a fraction of the mean
_FAILED = 0.2  # fraction of the answers for which a reward fails


@rule(
    "no signal",
    "warning",
    when=f"more than {percent(_SILENT)} of the groups, or of the groups of one of several "
    f"rewards, have equal rewards, on average over {_WINDOW} steps; a problem if it is all of "
    "them; information if the reward has risen by more than its first standard deviation, to "
    f"{percent(_SATURATED)} of its highest value or one whose highest value is not known",
    cure="prompts of another difficulty, a larger group_size, a higher temperature, or a "
    "reward with more values",
)
def no_signal(now: Observation, memory: Memory) -> Judgements:
    """Answers to one prompt have equal rewards, so that nothing tells them apart."""
    weighted = [reward for reward in now.rewards if reward.weight]
    yield from _silent_groups(
        now,
        memory,
        _Groups(
            "rollouts",
            "the answers",
            now.number("rollouts/no_signal"),
            now.number("rollouts/reward"),
            now.number("rollouts/reward_std"),
            _highest_sum(weighted),
        ),
    )
    # Of one reward it is that of the sum; gdpo has its own rule.
    if len(weighted) > 1 and now.facts.advantage != "gdpo":
        for reward in weighted:
            whose = f"the answers, by {title(reward.name, 'reward')},"
            groups = _Groups(
                reward.subject, whose, reward.no_signal, reward.mean, reward.std, _highest(reward)
            )
            yield from _silent_groups(now, memory, groups)


@dataclass(frozen=True)
class _Groups:
    """Groups of answers at a step: whose they are, how many are silent, and their reward.

    `highest` is the highest value of the reward; None if it is not known.
    """

    subject: str
    whose: str
    silent: float | None
    reward: float | None
    std: float | None
    highest: float | None


def _highest_sum(rewards: Sequence[RewardStep]) -> float | None:
    """Highest value of the weighted sum of rewards; None if that of one is not known."""
    values = [(reward.weight or 0.0, _highest(reward)) for reward in rewards]
    known = [weight * highest for weight, highest in values if highest is not None]
    return sum(known) if known and len(known) == len(values) else None


def _silent_groups(now: Observation, memory: Memory, groups: _Groups) -> Judgements:
    reward, has_risen, first = groups.reward, False, 0.0
    if reward is not None:
        first = memory.first(f"{groups.subject}/first", reward)[0]
        spread = memory.first(f"{groups.subject}/spread", groups.std or 0.0)[0]
        has_risen = reward > first + spread
    if groups.silent is None:
        return
    fractions = memory.last(f"{groups.subject}/silent", groups.silent, _WINDOW)
    mean = sum(fractions) / len(fractions)
    # Between the two thresholds it neither begins nor ends.
    if len(fractions) < _WINDOW or _HEARD <= mean <= _SILENT:
        return
    if mean < _HEARD:
        yield groups.subject, None
        return
    cause = ""
    severity: Severity | None = "problem" if mean >= 1 else None
    cure = (
        "take prompts of another difficulty, a larger group_size, a higher temperature, or a "
        "reward with more values"
    )
    if reward is not None and has_risen:
        cause = f"the reward has risen from {first:.3g} to {reward:.3g}"
        if groups.highest is None:
            severity = "information"
            cure = "take harder prompts, or stop, if that is near its highest value"
        elif reward >= _SATURATED * groups.highest:
            severity, cure = "information", "take harder prompts, or stop"
            cause += ": little is left to learn"
        else:
            cause += f" of {groups.highest:.3g}: the answers to most prompts have become alike"
            cure = "take a larger group_size, a higher temperature, or an entropy term"
    yield (
        groups.subject,
        Diagnosis(
            f"in most groups {groups.whose} have equal rewards, and no signal",
            f"{percent(mean)} of the groups over {_WINDOW} steps up to step {now.step}",
            cure,
            cause,
            severity,
        ),
    )


@rule(
    "reward without spread",
    "warning",
    when=f"the first {_FIRST_ANSWERS} answers, or more, all have the same reward; a problem "
    "if no other reward has a weight",
    cure="a reward that tells answers apart; check that it reads the answer, and the field "
    "that it compares with",
)
def reward_without_spread(now: Observation, memory: Memory) -> Judgements:
    """A reward is the same for every answer since the start."""
    answers = now.facts.answers
    for reward in now.rewards:
        mean, std = reward.mean, reward.std
        if answers is None or mean is None or std is None or not reward.weight:
            continue
        if now.updated and not memory.holds(f"{reward.name}/mean"):  # resumed: no first answers
            continue
        first = memory.first(f"{reward.name}/mean", mean)[0]
        if std > 0 or mean != first:
            memory.first(f"{reward.name}/spread", 1.0)
        if memory.holds(f"{reward.name}/spread"):
            yield reward.subject, None
            continue
        seen = answers * len(memory.last(f"{reward.name}/steps", 1.0, _FIRST_ANSWERS))
        if seen < _FIRST_ANSWERS:
            continue
        is_alone = sum(bool(other.weight) for other in now.rewards) == 1
        closed = _closed_by(reward, now) if mean == 0 else ""
        cause = ""
        cure = (
            "check that it reads the answer and the right field of the record, or take one "
            "that tells answers apart"
        )
        if closed:
            cause = f"it is 0 where {title(closed, 'reward')} is, and that is 0 for all of them"
            cure = f"see {title(closed, 'reward')}"
        yield (
            reward.subject,
            Diagnosis(
                f"{title(reward.name, 'reward')} is the same for every answer",
                f"{mean:.3g} for the first {seen} answers, up to step {now.step}",
                cure,
                cause,
                severity="problem" if is_alone else None,
            ),
        )


def _closed_by(reward: RewardStep, now: Observation) -> str:
    """Name of the reward that is 0 for all answers and a factor of this one; empty if none is."""
    zeros = {other.name for other in now.rewards if other.mean == 0 and other.std == 0}
    return next((name for name in reward.facts.factors if name in zeros), "")


@rule(
    "saturated at the start",
    "warning",
    when=f"the mean of a reward over the first {_FIRST_ANSWERS} answers is at least "
    f"{percent(_SATURATED)} of its highest value, where that is known or its values are 0 and "
    "1",
    cure="harder prompts, or a stricter reward",
)
def saturated_at_the_start(now: Observation, memory: Memory) -> Judgements:
    """A reward leaves nothing to learn before training has begun."""
    answers = now.facts.answers
    for reward in now.rewards:
        mean, highest = reward.mean, _highest(reward)
        if answers is None or mean is None or not reward.weight:
            continue
        key = f"{reward.name}/mean"
        if now.updated and not memory.holds(key):
            continue
        steps = -(-_FIRST_ANSWERS // answers)
        means = memory.first(key, mean, steps)
        at_start = sum(means) / len(means)
        if len(means) < steps or highest is None or at_start < _SATURATED * highest:
            continue
        if mean < _UNSATURATED * highest:
            yield reward.subject, None
            continue
        yield (
            reward.subject,
            Diagnosis(
                f"{title(reward.name, 'reward')} is near its highest value before training",
                f"{at_start:.3g} of {highest:.3g} over the first {steps * answers} answers",
                "take harder prompts, or a stricter reward",
            ),
        )


def _highest(reward: RewardStep) -> float | None:
    """Highest value of a reward: declared, or 1 if its spread is that of zeros and ones."""
    mean, std = reward.mean, reward.std
    if reward.facts.highest is not None or mean is None or std is None:
        return reward.facts.highest
    # The variance of zeros and ones is m (1 - m), times n / (n - 1) for a sample of n.
    variance = mean * (1 - mean)
    is_binary = 0 < mean < 1 and 0.99 * variance <= std * std <= 1.2 * variance
    return 1.0 if is_binary else None


@rule(
    "truncated",
    "warning",
    when=f"more than {percent(_TRUNCATED)} of the answers end at max_tokens; information if "
    f"the rewards of more than {percent(_TRUNCATED)} of the groups differ all the same",
    cure="a larger max_tokens, a stop sequence, or prompts that ask for short answers",
    begin=(3, 3),
    end=3,
)
def truncated(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """Rewards judge answers that are cut."""
    fraction = now.number("rollouts/truncated")
    if fraction is None:
        return
    silent = now.number("rollouts/no_signal")
    length = now.number("rollouts/answer_tokens")
    mean = "" if length is None else f", {length:.0f} tokens on average"
    diagnosis = Diagnosis(
        "most answers are cut at the maximum length",
        f"{percent(fraction)} at step {now.step}{mean}",
        "raise max_tokens, give a stop sequence, or ask for short answers",
        severity="information" if silent is not None and silent < 1 - _TRUNCATED else None,
    )
    yield "rollouts", diagnosis if fraction > _TRUNCATED else None


@rule(
    "reward fails",
    "warning",
    when=f"a reward fails for more than {percent(_FAILED)} of the answers; a problem if for all",
    cure="repair the reward, or its service; raise its timeout",
    begin=(2, 2),
    end=3,
)
def reward_fails(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """Answers are dropped since a reward fails."""
    for reward in now.rewards:
        all_failed = reward.failed > 0 and f"{reward.subject}/mean" not in now.metrics
        if not all_failed and now.facts.answers is None:
            continue
        answers = max(now.facts.answers or 0.0, reward.failed)
        fails = all_failed or reward.failed > _FAILED * answers
        if not fails:
            yield reward.subject, None
            continue
        whose = "every" if all_failed else "many"
        yield (
            reward.subject,
            Diagnosis(
                f"{title(reward.name, 'reward')} fails for {whose} answers",
                f"{reward.failed:.0f} of {answers:.0f} answers at step {now.step}",
                "repair it or its service, or raise its timeout",
                severity="problem" if all_failed else None,
            ),
        )


@rule(
    "entropy collapsed",
    "warning",
    when=f"the entropy of the sampled tokens is below {percent(_COLLAPSED)} of that of the "
    "first three steps, unless a reward is near its highest value",
    cure="an entropy term with at_least, a higher temperature, or a smaller learning rate",
    begin=(5, 5),
    end=5,
)
def entropy_collapsed(now: Observation, memory: Memory) -> Judgements:
    """The model no longer explores."""
    entropy = now.number("rollouts/entropy")
    if entropy is None or (now.updated and not memory.holds("entropy")):
        return
    first = memory.mean_of_first("entropy", entropy)
    is_solved = any(
        reward.mean is not None
        and (highest := _highest(reward)) is not None
        and reward.mean >= _SATURATED * highest
        for reward in now.rewards
    )
    diagnosis = Diagnosis(
        "the entropy of the answers has collapsed: the model no longer explores",
        f"{first:.3g} → {entropy:.3g} at step {now.step}",
        f"add an entropy term with at_least = {first / 3:.2g}, or lower the learning rate",
    )
    yield "rollouts", diagnosis if entropy < _COLLAPSED * first and not is_solved else None


@rule(
    "ratios off before any update",
    "problem",
    when=f"at the first update of a step, the mean ratio is off 1 by more than {_RATIO:g}, or "
    f"more than {percent(_CLIPPED)} of the tokens are outside the clip",
    cure="sample with the weights, the temperature and the numerics that are trained with",
    begin=(3, 5),
    end=5,
)
def ratios_off(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """Sampled and trained log-probs differ although no update lies between them."""
    prefix = "" if now.facts.substeps == 1 and now.facts.advantage else "first_substep/"
    ratio, clipped = now.number(f"{prefix}ratio"), now.number(f"{prefix}clip_fraction")
    if ratio is None and clipped is None:
        return
    parts = []
    if ratio is not None:
        parts.append(f"mean ratio {ratio:.3g}")
    if clipped is not None:
        parts.append(f"{percent(clipped)} of the tokens outside the clip")
    diagnosis = Diagnosis(
        "sampled and trained log-probs differ before any update",
        f"{', '.join(parts)} at step {now.step}",
        "sample with the weights, the temperature and the dtype that are trained with",
        "the sampler has other weights, another temperature or other numerics than the trainer",
    )
    is_off = (ratio is not None and abs(ratio - 1) > _RATIO) or (clipped or 0.0) > _CLIPPED
    yield "rollouts", diagnosis if is_off else None


@rule(
    "nearly constant reward",
    "information",
    when=f"with advantage = 'gdpo', a reward is equal in more than {percent(_SILENT)} of the "
    f"groups, but not in all, or its standard deviation is above 0 and below {percent(_CONSTANT)} "
    "of its mean",
    cure="a weight of 0 for it, or one reward that is their sum with another advantage",
    begin=(5, 5),
    end=5,
)
def nearly_constant_reward(now: Observation, memory: Memory) -> Judgements:  # noqa: ARG001 - keeps nothing
    """Normalised in its group, the noise of a reward counts as much as the signal of others."""
    if now.facts.advantage != "gdpo":
        return
    for reward in now.rewards:
        mean, std = reward.mean, reward.std
        if mean is None or std is None or not reward.weight:
            continue
        # Where it is equal in all groups, its advantages are 0: nothing of it is left to be scaled.
        silent = reward.no_signal or 0.0
        varies = std > 0 and silent < 1
        is_constant = varies and (std < _CONSTANT * abs(mean) or silent > _SILENT)
        if not is_constant:
            yield reward.subject, None
            continue
        yield (
            reward.subject,
            Diagnosis(
                f"{title(reward.name, 'reward')} is nearly constant, and gdpo scales what is left "
                "of it to the size of the others",
                f"{mean:.3g} ± {std:.2g} at step {now.step}",
                "set its weight to 0, or compare the sum of the rewards (advantage='grpo')",
            ),
        )
