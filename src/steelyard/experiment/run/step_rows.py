"""Metrics of one step as rows: one for each term, one for each reward, and short facts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.output.step_metrics import (
    Gradient,
    gradients,
    reward_names,
    short_reason,
    skipped_terms,
    space_label,
    terms_that_ran,
)


@dataclass(frozen=True)
class TermRow:
    """Numbers of one term at one step; None where a number does not exist.

    Attributes:
        name: name of the term; `"base"` is the base loss.
        value: value before the weight is applied.
        bound: bound of the value; None for a term with a weight.
        weight: weight at this step, or the multiplier that holds the value at its bound.
        contribution: weight × value, the summand in the total loss.
        grad_norm: norm of the weighted gradient.
        space: what the gradient is with respect to.
        share: `grad_norm` divided by the sum of the norms of all terms in this space.
        cosine: cosine between this gradient and that of the base loss.
        factor: factor that an aggregator put on the weighted gradient; None for the plain sum.
        progress: change of the value by the step, where it was measured.
        seconds: duration of the call, gradient included.
        skipped: error for which the term was skipped at this step; None if it was not.
    """

    name: str
    value: float | None = None
    weight: float | None = None
    contribution: float | None = None
    grad_norm: float | None = None
    space: str | None = None
    share: float | None = None
    cosine: float | None = None
    seconds: float | None = None
    skipped: str | None = None
    bound: float | None = None
    factor: float | None = None
    progress: float | None = None

    @property
    def space_label(self) -> str:
        """Words for what the gradient is with respect to; empty without a gradient."""
        return "" if self.space is None else space_label(self.space)


def rows_of(metrics: Mapping[str, Any]) -> list[TermRow]:
    """Rows of the base loss, of the terms that ran, in order, and of the skipped terms.

    Example:
        >>> metrics = {
        ...     "base_loss/value": 2.0, "base_loss/grad_norm": 1.0,
        ...     "regularizers/kl/value": 3.0, "regularizers/kl/weight": 0.5,
        ...     "regularizers/kl/contribution": 1.5, "regularizers/kl/grad_norm": 6.0,
        ...     "regularizers/kl/grad_norm_weighted": 3.0, "cosines/base/kl": 0.1,
        ... }
        >>> [(row.name, row.share) for row in rows_of(metrics)]
        [('base', 0.25), ('kl', 0.75)]
    """
    names = terms_that_ran(metrics)
    by_name = gradients([metrics], names)
    value = metrics["base_loss/value"]
    base = TermRow(
        "base",
        value,
        contribution=value,
        **_gradient_columns(by_name.get("base")),
        factor=metrics.get("factors/base"),
        progress=metrics.get("base_loss/progress"),
    )
    skipped = [
        TermRow(name, skipped=short_reason(reason))
        for name, reason in skipped_terms(metrics).items()
    ]
    return [base, *(_row(name, metrics, by_name.get(name)) for name in names), *skipped]


def _row(name: str, metrics: Mapping[str, Any], gradient: Gradient | None) -> TermRow:
    prefix = f"regularizers/{name}"
    return TermRow(
        name,
        metrics[f"{prefix}/value"],
        metrics[f"{prefix}/weight"],
        metrics[f"{prefix}/contribution"],
        **_gradient_columns(gradient),
        bound=metrics.get(f"{prefix}/bound"),
        factor=metrics.get(f"factors/{name}"),
        progress=metrics.get(f"{prefix}/progress"),
        seconds=metrics.get(f"{prefix}/duration"),
    )


def _gradient_columns(gradient: Gradient | None) -> dict[str, Any]:
    if gradient is None:
        return {}
    return {
        "grad_norm": gradient.norm,
        "space": gradient.space,
        "share": gradient.share,
        "cosine": gradient.cosine,
    }


def throughput(metrics: Mapping[str, Any]) -> list[str]:
    """Tokens that were trained on in a second, as text; empty if they were not counted.

    Example:
        >>> throughput({"tokens_per_second": 1234.5})
        ['1,234 tokens/s']
    """
    tokens = metrics.get("tokens_per_second")
    return [] if tokens is None else [f"{tokens:,.0f} tokens/s"]


def evaluation_values(metrics: Mapping[str, Any]) -> list[str]:
    """Values of the evaluation functions at this step, as text.

    Example:
        >>> evaluation_values({"eval/accuracy": 0.5})
        ['accuracy 0.5']
    """
    prefix = "eval/"
    return [
        f"{key.removeprefix(prefix)} {value:.4g}"
        for key, value in metrics.items()
        if key.startswith(prefix)
    ]


# Metrics of the answers, with the words and the form in which they are shown.
_FACTS = (
    ("rollouts/no_signal", "groups without signal", "{:.0%}"),
    ("rollouts/answer_tokens", "tokens per answer", "{:.1f}"),
    ("rollouts/truncated", "truncated", "{:.0%}"),
    ("rollouts/dropped", "dropped", "{:.0f}"),
    ("rollouts/entropy", "entropy", "{:.3g}"),
    ("rollouts/kl", "KL", "{:.3g}"),
    ("clip_fraction", "clipped", "{:.0%}"),
)


@dataclass(frozen=True)
class RewardRow:
    """Numbers of one reward at one step.

    Attributes:
        name: name of the reward.
        mean: mean over the answers; None if it failed for all of them.
        std: sample standard deviation over the answers.
        weight: weight at this step; 0 if it is not enabled.
        failed: number of answers for which it failed.
        grad_norm: norm of the part of the gradient of the base loss that is due to it.
        share: `grad_norm` divided by the sum of these norms.
        cosine: cosine between this part and the gradient of the base loss.
    """

    name: str
    mean: float | None
    std: float | None
    weight: float
    failed: int
    grad_norm: float | None = None
    share: float | None = None
    cosine: float | None = None

    @property
    def text(self) -> str:
        """Mean and standard deviation, and for how many answers it failed, if any."""
        if self.mean is None:
            return "failed"
        failed = f" ({self.failed} failed)" if self.failed else ""
        return f"{self.mean:.3g} ± {self.std:.2g}{failed}"


def reward_rows(metrics: Mapping[str, Any]) -> list[RewardRow]:
    """Rows of the rewards of a step, in order; none for a run without rollouts.

    Example:
        >>> metrics = {"rewards/a/mean": 0.5, "rewards/a/std": 0.1, "rewards/a/weight": 2.0}
        >>> [(row.name, row.text, row.weight) for row in reward_rows(metrics)]
        [('a', '0.5 ± 0.1', 2.0)]
    """
    names = reward_names(metrics)
    norms = {name: metrics.get(f"rewards/{name}/grad_norm") for name in names}
    total = math.fsum(norm for norm in norms.values() if norm is not None)
    return [
        RewardRow(
            name,
            metrics.get(f"rewards/{name}/mean"),
            metrics.get(f"rewards/{name}/std"),
            metrics[f"rewards/{name}/weight"],
            int(metrics.get(f"rewards/{name}/failed", 0)),
            norm,
            norm / total if norm is not None and total > 0 else None,
            metrics.get(f"rewards/{name}/cosines/base"),
        )
        for name, norm in norms.items()
    ]


def answer_facts(metrics: Mapping[str, Any]) -> list[str]:
    """Short texts about the answers of a step; none for a run without rollouts.

    Example:
        >>> answer_facts({"rollouts/reward": 0.5, "rollouts/reward_std": 0.1, "rollouts/kl": 0.02})
        ['reward 0.5 ± 0.1', 'KL 0.02']
    """
    facts = []
    if "rollouts/reward" in metrics:
        mean, std = metrics["rollouts/reward"], metrics["rollouts/reward_std"]
        facts.append(f"reward {mean:.3g} ± {std:.2g}")
    return facts + [
        f"{label} {form.format(metrics[key])}"
        for key, label, form in _FACTS
        # Answers are rarely dropped.
        if key in metrics and (key != "rollouts/dropped" or metrics[key])
    ]
