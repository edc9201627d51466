"""Parse the flat metrics of a step, a line of `metrics.jsonl`: terms, gradients, rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from steelyard.output.custom_loss import CustomLossOutput

_TERM, _RAN, _SKIPPED, _REASON = "regularizers/", "/contribution", "skipped/", "/reason"
_SPACE, _BASE_NORM = "/grad_space", "base_loss/grad_norm"
# 0.1.0 wrote no spaces; there, as a rule, a gradient is with respect to the log-probs.
_DEFAULT_SPACE = "logprobs"
_REWARD, _WEIGHT = "rewards/", "/weight"
_MAX_WORDS = 12  # of a shortened reason


@dataclass(frozen=True)
class _Names:
    """Names of the terms that ran, the rewards and what may be skipped terms, in a set of keys."""

    terms: list[str]
    rewards: list[str]
    skipped: list[str]


@lru_cache(maxsize=16)  # the steps of a run have the same few sets of keys
def _names_in(keys: tuple[str, ...]) -> _Names:
    return _Names(
        [
            key.removeprefix(_TERM).removesuffix(_RAN)
            for key in keys
            if key.startswith(_TERM) and key.endswith(_RAN) and "/custom/" not in key
        ],
        [
            key.removeprefix(_REWARD).removesuffix(_WEIGHT)
            for key in keys
            if key.startswith(_REWARD) and key.endswith(_WEIGHT)
        ],
        [key.removeprefix(_SKIPPED) for key in keys if key.startswith(_SKIPPED)],
    )


def terms_that_ran(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the terms that ran in this step, in the order of the metrics."""
    return list(_names_in(tuple(metrics)).terms)


def reward_names(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the rewards in this step, in the order of the metrics; none without rollouts.

    Example:
        >>> reward_names({"rewards/short/mean": 0.5, "rewards/short/weight": 1.0})
        ['short']
    """
    return list(_names_in(tuple(metrics)).rewards)


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
    return {
        name: str(metrics.get(f"{_SKIPPED}{name}{_REASON}", ""))
        for name in _names_in(tuple(metrics)).skipped
        if not isinstance(metrics[f"{_SKIPPED}{name}"], str)
    }


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
    by_step: dict[str, list[float | None]] = {name: [] for name in spaces}
    for line in lines:
        for name, space in spaces.items():
            if str(line.get(_space_key(name), _DEFAULT_SPACE)) == space:
                by_step[name].append(weighted_norm(line, name))
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
    against_base = _against_base(lines, [name for name in norms if name != "base"])
    return {
        name: Gradient(
            norm,
            space := spaces[name],
            norm / totals[space] if totals[space] > 0 else None,
            members[space] == 1,
            *against_base.get(name, ()),
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
    return metrics.get(_BASE_NORM if name == "base" else f"{_TERM}{name}/grad_norm_weighted")


def cosine_to_base(metrics: Mapping[str, Any], name: str) -> float | None:
    """Cosine between the gradients of a term and the base loss; None where one of them is 0."""
    if not metrics.get(f"{_TERM}{name}/grad_norm") or not metrics.get(_BASE_NORM):
        return None
    return metrics.get(f"cosines/base/{name}")


def _space_key(name: str) -> str:
    return f"base_loss{_SPACE}" if name == "base" else f"{_TERM}{name}{_SPACE}"


def _space_of(lines: Sequence[Mapping[str, Any]], name: str) -> str:
    key = _space_key(name)
    return str(next((line[key] for line in reversed(lines) if key in line), _DEFAULT_SPACE))


def _against_base(
    lines: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, tuple[float | None, float | None]]:
    """Of each term: mean cosine to the gradient of the base loss, and how much of it is cancelled.

    The second is the fraction `-sum_t <w g, g_base> / sum_t ||g_base||^2`.
    """
    cosines: dict[str, list[float]] = {name: [] for name in names}
    products: dict[str, list[float]] = {name: [] for name in names}
    squares = []
    for line in lines:
        base = weighted_norm(line, "base") or 0.0
        if math.isfinite(base):
            squares.append(base * base)
        for name in names if base else ():
            cosine = cosine_to_base(line, name)
            product = base * (weighted_norm(line, name) or 0.0) * (cosine or 0.0)
            if cosine is not None and math.isfinite(product):
                cosines[name].append(cosine)
                products[name].append(product)
    return {
        name: (math.fsum(values) / len(values), -math.fsum(products[name]) / math.fsum(squares))
        for name, values in cosines.items()
        if values
    }
