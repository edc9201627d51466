"""Metrics of the answers of one step: `rewards/<name>/...` and `rollouts/...`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tinker import types
from torch import Tensor

from steelyard.experiment.data.base_model_outputs import FIELD
from steelyard.experiment.rewards.reward import Reward
from steelyard.experiment.rollouts.answers import ScoredAnswer
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input


def reward_metrics(
    rewards: Sequence[Reward], scored: Sequence[ScoredAnswer], step: int
) -> dict[str, float]:
    """Mean and sample standard deviation of each reward over the answers that have it.

    `rewards/<name>/mean` and `/std`, its `/weight`, and `/failed`, the number of answers for which
    it failed, if there are any; `rollouts/reward` and `rollouts/reward_std` of the weighted sum,
    over the answers that are left.
    """
    metrics: dict[str, float] = {}
    for reward in rewards:
        scores = [answer.scores[reward.name] for answer in scored if reward.name in answer.scores]
        values = [score.value for score in scores if score.value is not None]
        prefix = f"rewards/{reward.name}"
        if values:
            metrics[f"{prefix}/mean"], metrics[f"{prefix}/std"] = mean_and_std(values)
        metrics[f"{prefix}/weight"] = reward.weight_at(step)
        if len(values) < len(scores):
            metrics[f"{prefix}/failed"] = float(len(scores) - len(values))
    totals = [answer.reward for answer in scored if answer.reward is not None]
    if totals:
        metrics["rollouts/reward"], metrics["rollouts/reward_std"] = mean_and_std(totals)
    return metrics


def group_metrics(groups: Sequence[Sequence[ScoredAnswer]]) -> dict[str, float]:
    """Metrics of the answers of a step.

    - `rewards/<name>/no_signal`: fraction of groups in which a reward is equal for all answers that
      have it, or which have none to compare;
    - `rollouts/no_signal`: fraction of groups whose advantages are all 0, since their rewards are
      equal or fewer than two answers are left;
    - `rollouts/dropped`: number of answers that were dropped;
    - `rollouts/answer_tokens`: mean length; `rollouts/truncated`: fraction that ended at
      `max_tokens`;
    - `rollouts/entropy`: mean of -log-prob of the sampled tokens, an estimate of the entropy of
      the distribution that they were sampled from.
    """
    answers = [scored.answer for group in groups for scored in group]
    silent = sum(not any(answer.advantage for answer in group) for group in groups)
    logprobs = [value for answer in answers for value in answer.logprobs]
    lengths = [len(answer.tokens) for answer in answers]
    names = dict.fromkeys(name for group in groups for scored in group for name in scored.scores)
    return {
        **{f"rewards/{name}/no_signal": _silent(groups, name) for name in names},
        "rollouts/no_signal": silent / len(groups),
        "rollouts/dropped": float(
            sum(scored.reward is None for group in groups for scored in group)
        ),
        "rollouts/answer_tokens": math.fsum(lengths) / len(lengths),
        "rollouts/truncated": sum(answer.truncated for answer in answers) / len(answers),
        "rollouts/entropy": -math.fsum(logprobs) / max(len(logprobs), 1),
    }


def _silent(groups: Sequence[Sequence[ScoredAnswer]], name: str) -> float:
    """Fraction of the groups in which a reward tells no two answers apart."""
    values = [
        {scored.scores[name].value for scored in group if name in scored.scores} - {None}
        for group in groups
    ]
    return sum(len(of_group) < 2 for of_group in values) / len(groups)  # noqa: PLR2004 - a pair


def reward_seconds(scored: Sequence[ScoredAnswer], seconds: float) -> dict[str, float]:
    """`rewards/<name>/seconds`: the time of scoring, divided like the durations of the calls.

    Calls run at the same time, so that their durations add up to more than the step waits.
    """
    durations: dict[str, float] = {}
    for answer in scored:
        for name, result in answer.scores.items():
            durations[name] = durations.get(name, 0.0) + result.seconds
    total = math.fsum(durations.values())
    return {
        f"rewards/{name}/seconds": seconds * duration / total
        for name, duration in durations.items()
        if total > 0
    }


def kl_metric(data: Sequence[types.Datum]) -> dict[str, float]:
    """`rollouts/kl`: mean over the sampled tokens of `r - 1 - log r`, with r = reference / sampled.

    An estimate (k3, never negative, with log r clamped to ±20) of the KL divergence of the
    distribution that was sampled from from that of the base model: the value of `KLToReference`,
    with the log-probs of the sampler. Empty if the data have no `reference_logprobs`.
    """
    if not data or loss_fn_input(data[0], FIELD) is None:
        return {}
    total, tokens = 0.0, 0
    for datum in data:
        kept = _field(datum, "weights") > 0
        log_ratio = (_field(datum, FIELD) - _field(datum, "logprobs"))[kept].clamp(-20, 20)
        total += float((log_ratio.expm1() - log_ratio).sum())
        tokens += int(kept.sum())
    return {"rollouts/kl": total / max(tokens, 1)}


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; 0 for a single value."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return math.fsum(values) / len(values), spread


def _field(datum: types.Datum, name: str) -> Tensor:
    return as_tensor(loss_fn_input(datum, name)).double()


def held_out_metrics(
    rewards: Sequence[Reward], scored: Sequence[ScoredAnswer], step: int
) -> dict[str, float]:
    """`held_out/rewards/<name>`, means, and `held_out/reward`, their weighted sum."""
    metrics = reward_metrics(rewards, scored, step)
    held_out = {
        f"held_out/rewards/{reward.name}": metrics[f"rewards/{reward.name}/mean"]
        for reward in rewards
        if f"rewards/{reward.name}/mean" in metrics
    }
    if "rollouts/reward" in metrics:
        held_out["held_out/reward"] = metrics["rollouts/reward"]
    dropped = sum(answer.reward is None for answer in scored)
    return {**held_out, **({"held_out/dropped": float(dropped)} if dropped else {})}
