"""What a step's metrics say of each term, and what is worth a mark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from steelyard.experiment import dominates, fights

_PREFIX, _LAST = "regularizers/", "/contribution"


@dataclass(frozen=True)
class Row:
    """One term at one step; None where there is no such number.

    Attributes:
        name: of the term; `"base"` is the base loss.
        value: before the weight.
        weight: at this step.
        contribution: what it adds to the loss.
        grad_norm: of its gradient, weighted.
        share: of the gradients of all terms, by norm.
        cosine: to the gradient of the base loss.
        seconds: it took.
        mark: `"dominates"`, `"fights the base loss"`, `"no gradient"` or `""`.
    """

    name: str
    value: float
    weight: float | None
    contribution: float
    grad_norm: float | None
    share: float | None
    cosine: float | None
    seconds: float | None
    mark: str


def rows_of(metrics: Mapping[str, float]) -> list[Row]:
    """The base loss and the terms that ran, in order.

    Example:
        >>> metrics = {
        ...     "base_loss/value": 2.0, "base_loss/grad_norm": 1.0,
        ...     "regularizers/kl/value": 3.0, "regularizers/kl/weight": 0.5,
        ...     "regularizers/kl/contribution": 1.5, "regularizers/kl/grad_norm": 6.0,
        ...     "regularizers/kl/grad_norm_weighted": 3.0, "cosines/base/kl": 0.1,
        ... }
        >>> [(row.name, row.share, row.mark) for row in rows_of(metrics)]
        [('base', 0.25, ''), ('kl', 0.75, 'dominates')]
    """
    names = [
        key.removeprefix(_PREFIX).removesuffix(_LAST)
        for key in metrics
        if key.startswith(_PREFIX) and key.endswith(_LAST) and "/custom/" not in key
    ]
    tracked = "base_loss/grad_norm" in metrics
    norms = [metrics.get(f"{_PREFIX}{name}/grad_norm_weighted", 0.0) for name in names]
    total = metrics.get("base_loss/grad_norm", 0.0) + sum(norms)
    value = metrics["base_loss/value"]
    norm = metrics.get("base_loss/grad_norm")
    base = Row("base", value, None, value, norm, _share(norm, total), None, None, "")
    return [base, *(_row(name, metrics, total, tracked=tracked) for name in names)]


def _row(name: str, metrics: Mapping[str, float], total: float, *, tracked: bool) -> Row:
    def of(key: str) -> float | None:
        return metrics.get(f"{_PREFIX}{name}/{key}")

    weight, norm = metrics[f"{_PREFIX}{name}/weight"], of("grad_norm_weighted")
    share, cosine = _share(norm, total), metrics.get(f"cosines/base/{name}")
    mark = ""
    if tracked and of("grad_norm") is None:
        mark = "no gradient"
    elif dominates(share):
        mark = "dominates"
    elif weight and fights(cosine):
        mark = "fights the base loss"
    return Row(
        name,
        metrics[f"{_PREFIX}{name}/value"],
        weight,
        metrics[f"{_PREFIX}{name}/contribution"],
        norm,
        share,
        cosine,
        of("duration"),
        mark,
    )


def _share(norm: float | None, total: float) -> float | None:
    return None if norm is None or not total else norm / total
