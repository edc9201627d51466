"""Metrics of one step as table rows, one for each term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steelyard.experiment import (
    Gradient,
    flags_of,
    gradients,
    short_reason,
    skipped_terms,
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
        flags: warnings about these numbers, see `steelyard.experiment.flags`.
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
    flags: tuple[str, ...] = ()
    skipped: str | None = None
    bound: float | None = None
    factor: float | None = None
    progress: float | None = None


def rows_of(metrics: Mapping[str, Any]) -> list[TermRow]:
    """Rows of the base loss, of the terms that ran, in order, and of the skipped terms.

    Example:
        >>> metrics = {
        ...     "base_loss/value": 2.0, "base_loss/grad_norm": 1.0,
        ...     "regularizers/kl/value": 3.0, "regularizers/kl/weight": 0.5,
        ...     "regularizers/kl/contribution": 1.5, "regularizers/kl/grad_norm": 6.0,
        ...     "regularizers/kl/grad_norm_weighted": 3.0, "cosines/base/kl": 0.1,
        ... }
        >>> [(row.name, row.share, row.flags) for row in rows_of(metrics)]
        [('base', 0.25, ()), ('kl', 0.75, ('dominates',))]
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
    weight = metrics[f"{prefix}/weight"]
    return TermRow(
        name,
        metrics[f"{prefix}/value"],
        weight,
        metrics[f"{prefix}/contribution"],
        **_gradient_columns(gradient),
        bound=metrics.get(f"{prefix}/bound"),
        factor=metrics.get(f"factors/{name}"),
        progress=metrics.get(f"{prefix}/progress"),
        seconds=metrics.get(f"{prefix}/duration"),
        flags=flags_of(tracked="base_loss/grad_norm" in metrics, weight=weight, gradient=gradient),
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
    found = metrics.get("tokens_per_second")
    return [] if found is None else [f"{found:,.0f} tokens/s"]


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
