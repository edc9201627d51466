"""Parse the flat metrics of a step, a line of `metrics.jsonl`: terms, gradients, rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.output.custom_loss import CustomLossOutput

_TERM, _RAN, _SKIPPED, _REASON = "regularizers/", "/contribution", "skipped/", "/reason"
_SPACE = "/grad_space"
_REWARD, _WEIGHT = "rewards/", "/weight"
_MAX_WORDS = 12  # of a shortened reason


def terms_that_ran(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the terms that ran in this step, in the order of the metrics."""
    return [
        key.removeprefix(_TERM).removesuffix(_RAN)
        for key in metrics
        if key.startswith(_TERM) and key.endswith(_RAN) and "/custom/" not in key
    ]


def reward_names(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the rewards in this step, in the order of the metrics; none without rollouts.

    Example:
        >>> reward_names({"rewards/short/mean": 0.5, "rewards/short/weight": 1.0})
        ['short']
    """
    return [
        key.removeprefix(_REWARD).removesuffix(_WEIGHT)
        for key in metrics
        if key.startswith(_REWARD) and key.endswith(_WEIGHT)
    ]


def weighted_reward(
    metrics: Mapping[str, Any], weights: Mapping[str, float], key: str = "held_out/rewards/{}"
) -> float | None:
    """Sum of the means of the rewards with given weights, to compare runs with other weights.

    Args:
        metrics: metrics of a step.
        weights: weight of each reward, by name.
        key: key of the mean of a reward; `{}` stands for its name.

    Returns:
        The sum; None without rewards, or if one that has a weight was not measured.

    Example:
        >>> weighted_reward({"held_out/rewards/a": 1.0, "held_out/rewards/b": 3.0}, {"a": 2.0})
        2.0
    """
    values = [metrics.get(key.format(name)) for name, weight in weights.items() if weight]
    measured = [value for value in values if value is not None]
    if not measured or len(measured) < len(values):
        return None
    counted = [weight for weight in weights.values() if weight]
    return math.fsum(w * value for w, value in zip(counted, measured, strict=True))


def skip_reasons(skipped: Mapping[str, str]) -> dict[str, str]:
    """Metrics `skipped/<name>/reason`; the output's metrics have `skipped/<name>`, a number."""
    return {f"{_SKIPPED}{name}{_REASON}": reason for name, reason in skipped.items()}


def space_metrics(output: CustomLossOutput) -> dict[str, str]:
    """Metrics `base_loss/grad_space`, `regularizers/<name>/grad_space` of those with a norm."""
    base = {} if output.base_loss.grad_norm is None else {"base_loss/grad_space": output.grad_space}
    return base | {
        f"regularizers/{name}/grad_space": term.grad_space
        for name, term in output.regularizers.items()
        if term.grad_norm is not None
    }


def skipped_terms(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Reason for each skipped term, by name; an empty string if the line holds none.

    Example:
        >>> line = {"skipped/judge": 1.0, "skipped/judge/reason": "TermTimeoutError: too late"}
        >>> skipped_terms(line)
        {'judge': 'TermTimeoutError: too late'}
    """
    names = [
        key.removeprefix(_SKIPPED)
        for key, value in metrics.items()
        if key.startswith(_SKIPPED) and not isinstance(value, str)
    ]
    return {name: str(metrics.get(f"{_SKIPPED}{name}{_REASON}", "")) for name in names}


def mean_metrics(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Metrics of a step with several optimizer steps: the means of numbers, the last of texts.

    Example:
        >>> mean_metrics([{"loss_total": 1.0, "grad_space": "logprobs"}, {"loss_total": 3.0}])
        {'loss_total': 2.0, 'grad_space': 'logprobs'}
    """
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for metrics in batches for key in metrics):
        values = [metrics[key] for metrics in batches if key in metrics]
        numbers = all(isinstance(value, int | float) for value in values)
        merged[key] = math.fsum(values) / len(values) if numbers else values[-1]
    return merged


def failed_row(step: int, time: float, error: Exception) -> dict[str, Any]:
    """Row of a step that ended with an error: its class and message, and the term at fault.

    Example:
        >>> failed_row(3, 0.0, ValueError("no"))
        {'step': 3, 'time': 0.0, 'failed': 'ValueError', 'failed/reason': 'no'}
    """
    name = getattr(error, "term", None)
    at_fault = {"failed/term": name} if isinstance(name, str) else {}
    row = {"step": step, "time": time, "failed": type(error).__name__, "failed/reason": str(error)}
    return row | at_fault


def short_reason(reason: str) -> str:
    """Shorten the reason of a skipped term to the class of the error and its first words.

    Example:
        >>> short_reason("OSError: a b c d e f g h i j k l m n")
        'OSError: a b c d e f g h i j k …'
    """
    words = reason.split()
    return " ".join([*words[:_MAX_WORDS], *(["…"] if len(words) > _MAX_WORDS else [])])


@dataclass(frozen=True)
class Gradient:
    """Weighted gradient of the base loss or of one term, at one step or summed over several.

    Attributes:
        norm: norm of the weighted gradient, summed over the steps; 0 where the term did not run.
        space: what the gradient is with respect to, such as `"logprobs"`. Norms of different
            spaces have different units and are never added.
        share: `norm` divided by the sum of the norms in its space; None if that is 0.
        alone: whether nothing else has a gradient in this space, so that its share is always 1.
        cosine: mean cosine to the gradient of the base loss over the steps at which both are not
            0; None in another space than that of the base loss.
        cancelled: fraction of the gradient of the base loss that this one cancels,
            `-sum_t <w g, g_base> / sum_t ||g_base||^2`; negative if it adds to it.
    """

    norm: float
    space: str
    share: float | None = None
    alone: bool = False
    cosine: float | None = None
    cancelled: float | None = None


def gradients(lines: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Gradient]:
    """Gradients of `"base"` and of the terms over these steps; those without a norm are left out.

    Norms are added, not gradients, which may cancel: the shares of one space add up to 1. A term
    whose space depends on the data has those of the steps with the space of its last one.

    Example:
        >>> line = {"base_loss/grad_norm": 3.0, "regularizers/kl/grad_norm_weighted": 1.0}
        >>> {name: each.share for name, each in gradients([line], ["kl", "judge"]).items()}
        {'base': 0.75, 'kl': 0.25}
    """
    spaces = {name: _space_of(lines, name) for name in ("base", *names)}
    by_step = {
        name: [weighted_norm(line, name) for line in lines if _space_of([line], name) == space]
        for name, space in spaces.items()
    }
    norms = {
        # Norms that are not finite (`check_finite = false`) have no share.
        name: math.fsum(norm for norm in of_term if norm is not None and math.isfinite(norm))
        for name, of_term in by_step.items()
        if any(norm is not None for norm in of_term)
    }
    totals = {
        space: math.fsum(norms[name] for name in norms if spaces[name] == space)
        for space in set(spaces.values())
    }
    members = Counter(spaces[name] for name in norms)
    return {
        name: Gradient(
            norm,
            space := spaces[name],
            norm / totals[space] if totals[space] > 0 else None,
            members[space] == 1,
            *(_against_base(lines, name) if name != "base" else ()),
        )
        for name, norm in norms.items()
    }


def space_label(space: str) -> str:
    """Words for what a gradient is with respect to.

    Example:
        >>> space_label("logprobs"), space_label("hidden_states+logits")
        ('log-probs', 'hidden states and logits')
    """
    return space.replace("logprobs", "log-probs").replace("_", " ").replace("+", " and ")


def weighted_norm(metrics: Mapping[str, Any], name: str) -> float | None:
    """Norm of the weighted gradient of a term, or of `"base"`, at a step; None without one."""
    key = "base_loss/grad_norm" if name == "base" else f"{_TERM}{name}/grad_norm_weighted"
    return metrics.get(key)


def cosine_to_base(metrics: Mapping[str, Any], name: str) -> float | None:
    """Cosine between the gradients of a term and the base loss; None where one of them is 0."""
    if not metrics.get(f"{_TERM}{name}/grad_norm") or not metrics.get("base_loss/grad_norm"):
        return None
    return metrics.get(f"cosines/base/{name}")


def _space_of(lines: Sequence[Mapping[str, Any]], name: str) -> str:
    # 0.1.0 wrote no spaces; there, as a rule, a gradient is with respect to the log-probs.
    key = "base_loss/grad_space" if name == "base" else f"{_TERM}{name}{_SPACE}"
    return str(next((line[key] for line in reversed(lines) if key in line), "logprobs"))


def _against_base(
    lines: Sequence[Mapping[str, Any]], name: str
) -> tuple[float | None, float | None]:
    """Mean cosine to the gradient of the base loss, and the fraction of it that is cancelled."""
    cosines, products, squares = [], [], []
    for line in lines:
        base, norm = weighted_norm(line, "base") or 0.0, weighted_norm(line, name) or 0.0
        cosine = cosine_to_base(line, name)
        if cosine is not None and math.isfinite(base * norm * cosine):
            cosines.append(cosine)
            products.append(base * norm * cosine)
        if math.isfinite(base):
            squares.append(base**2)
    if not cosines:
        return None, None
    return math.fsum(cosines) / len(cosines), -math.fsum(products) / math.fsum(squares)
