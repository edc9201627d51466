"""Fairness: gaps between groups of data in the likelihood that the model assigns to them."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from steelyard._extras import require
from steelyard.gradients.layout import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import DatumRow, Source, counted_rows
from steelyard.spec.error_messages import title

Outcome: TypeAlias = Literal["logprob", "prob"]
Test: TypeAlias = Literal["kruskal", "anova", "none"]

# With n data a mean has the standard error s/√n; a gap between two such means has s·√(2/n), half
# of the spread s of single data at n = 8.
ENOUGH = 8


class SmallBatchWarning(UserWarning):
    """A batch has too few data for a statistic over them."""


@dataclass(frozen=True, kw_only=True)
class DemographicParity:
    """Gap between groups in the mean outcome of their data, whatever their labels.

    The outcome of a datum is its mean log-prob per token, or the exponential of that with
    `outcome="prob"` (for an answer of one token, its probability); a datum without a token that
    counts has none, and is left out. With m_g the mean outcome of the data of group g, the value
    is the mean of `|m_g - m_h|^power` over all pairs g < h of groups. It is 0 for a batch with
    fewer than two groups.

    The gaps of a batch are not those of the data it is drawn from. On average over batches, a
    squared gap of two means over n_g and n_h data is too large by s_g²/n_g + s_h²/n_h, with s_g²
    the variance of the outcomes within group g, and its gradient also minimizes these variances.
    `unbiased=True` subtracts the estimate of that excess from the batch; the value may then be
    negative, and pairs with a group of a single datum do not count. It does not reduce the noise
    of a small batch. The first batch with fewer than 8 data of a group gives a
    `SmallBatchWarning`.

    The gradient is exact (at a gap of exactly 0 with `power=1`: 0).

    Reads from each datum: the group, one number (with tinker's `Datum` as an array, a tensor or
    `TensorData`) or, in a plain mapping, a string; `weights` (optional), where 0 leaves a token
    out.

    Args:
        group: the field of `loss_fn_inputs` with the group, or a function `(datum, index)`.
        outcome: `"logprob"` or `"prob"`.
        power: 2 for squared gaps, 1 for absolute ones.
        unbiased: whether to correct squared gaps for the size of the batch.
        test: the test of equal outcomes whose `p_value` is reported: `"kruskal"`
            (Kruskal-Wallis), `"anova"`, or `"none"`. It does not affect value or gradient.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: SciPy is not installed, and `test` is not `"none"`.

    Example:
        >>> data = [{"loss_fn_inputs": {"group": g}} for g in (0, 0, 1, 1)]
        >>> lps = [torch.tensor([x]) for x in (-1.0, -2.0, -3.0, -5.0)]
        >>> loss, metrics = DemographicParity().compute(data, lps)
        >>> loss, metrics["gap"], round(metrics["p_value"], 4)
        (tensor(6.2500), 2.5, 0.1213)

    References:
        Dwork et al. (2012), "Fairness through awareness"; Kruskal & Wallis (1952), "Use of
        ranks in one-criterion variance analysis".
    """

    group: Source = "group"
    outcome: Outcome = "logprob"
    power: Literal[1, 2] = 2
    unbiased: bool = False
    test: Test = "kruskal"
    name: ClassVar[str] = "demographic_parity"

    def __post_init__(self) -> None:
        _check(self)

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]] | Any:
        """Compute the penalty; the largest `gap`, each group's mean, `groups` and `p_value`."""
        rows = counted_rows(data, logprobs)
        if not rows:
            return None
        groups = _grouped(rows, [row.read_label(self.group) for row in rows], self.outcome)
        metrics = {f"mean/{label}": group.mean().item() for label, group in groups.items()}
        samples = list(groups.values())
        metrics |= {"gap": _largest_gap(samples), "groups": float(len(groups))}
        _warn_if_small(self, groups)
        if self.test != "none" and len(groups) > 1:
            metrics["p_value"] = _p_value(self.test, samples)
        return _penalty(rows, [samples], self), metrics


@dataclass(frozen=True, kw_only=True)
class EqualizedOdds:
    """Gap between groups in the mean outcome of their data, among data with the same label.

    As `DemographicParity` within each label: with m_gy the mean outcome of the data of group g
    and label y, the value is the mean of `|m_gy - m_hy|^power` over all labels y and pairs g < h
    of groups that both have data of that label. A label with fewer than two groups in the batch
    does not count.

    The gradient is exact (at a gap of exactly 0 with `power=1`: 0).

    Reads from each datum: the group and the label, each one number (with tinker's `Datum` as an
    array, a tensor or `TensorData`) or, in a plain mapping, a string; `weights` (optional), where
    0 leaves a token out.

    Args:
        group: the field of `loss_fn_inputs` with the group, or a function `(datum, index)`.
        label: the same for the label.
        outcome: `"logprob"` or `"prob"`, as in `DemographicParity`.
        power: 2 for squared gaps, 1 for absolute ones.
        unbiased: as in `DemographicParity`, within each label.
        test: as in `DemographicParity`, within each label; the `p_value` combines those of all
            labels by Fisher's method.

    Raises:
        SpecError: an option is invalid.
        MissingExtraError: SciPy is not installed, and `test` is not `"none"`.

    Example:
        >>> data = [{"loss_fn_inputs": {"group": g, "label": y}} for y in (0, 1) for g in (0, 1)]
        >>> lps = [torch.tensor([x]) for x in (-1.0, -2.0, -3.0, -6.0)]
        >>> loss, metrics = EqualizedOdds(test="none").compute(data, lps)
        >>> loss, metrics["gap"]
        (tensor(5.), 3.0)

    References:
        Hardt, Price & Srebro (2016), "Equality of opportunity in supervised learning".
    """

    group: Source = "group"
    label: Source = "label"
    outcome: Outcome = "logprob"
    power: Literal[1, 2] = 2
    unbiased: bool = False
    test: Test = "kruskal"
    name: ClassVar[str] = "equalized_odds"

    def __post_init__(self) -> None:
        _check(self)
        _options.resolve_source(self, "label")

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]] | Any:
        """Compute the penalty; the largest `gap`, that of each label, and `p_value`."""
        rows = counted_rows(data, logprobs)
        if not rows:
            return None
        labels = [row.read_label(self.label) for row in rows]
        compared, p_values, metrics = [], [], {}
        for label in dict.fromkeys(labels):
            same_label = [row for row, own in zip(rows, labels, strict=True) if own == label]
            names = [row.read_label(self.group) for row in same_label]
            by_group = _grouped(same_label, names, self.outcome)
            _warn_if_small(self, by_group)
            groups = list(by_group.values())
            if len(groups) < 2:  # noqa: PLR2004 - nothing to compare
                continue
            compared.append(groups)
            metrics[f"gap/{label}"] = _largest_gap(groups)
            if self.test != "none":
                p_values.append(_p_value(self.test, groups))
        metrics["gap"] = max(metrics.values(), default=0.0)
        if p_values:
            metrics["p_value"] = _combined(p_values)
        return _penalty(rows, compared, self), metrics


def _check(regularizer: DemographicParity | EqualizedOdds) -> None:
    name = regularizer.name
    _options.resolve_source(regularizer, "group")
    _options.one_of("outcome", regularizer.outcome, ("logprob", "prob"), name)
    _options.require(regularizer.power in (1, 2), "power", "1 or 2", regularizer.power, name)
    _options.flag("unbiased", regularizer.unbiased, name)
    _options.require(
        not regularizer.unbiased or regularizer.power == 2,  # noqa: PLR2004 - squared gaps
        "unbiased", "False with power=1", regularizer.unbiased, name,
    )  # fmt: skip
    _options.one_of("test", regularizer.test, ("kruskal", "anova", "none"), name)
    if regularizer.test != "none":
        require("scipy", title(name))


def _grouped(
    rows: Sequence[DatumRow], labels: Sequence[Hashable], outcome: Outcome
) -> Mapping[Hashable, Tensor]:
    """Outcomes of the data of each group, `[n]`; a datum without a token has no outcome."""
    groups: dict[Hashable, list[Tensor]] = {}
    for row, label in zip(rows, labels, strict=True):
        if row.kept.numel():
            logprob = row.kept.mean()
            groups.setdefault(label, []).append(logprob.exp() if outcome == "prob" else logprob)
    return {label: torch.stack(outcomes) for label, outcomes in groups.items()}


def _largest_gap(groups: Sequence[Tensor]) -> float:
    means = [group.mean().item() for group in groups]
    return max(means, default=0.0) - min(means, default=0.0)


def _penalty(
    rows: Sequence[DatumRow],
    compared: Sequence[Sequence[Tensor]],
    options: DemographicParity | EqualizedOdds,
) -> Tensor:
    """Mean of `|m_g - m_h|^power` over the pairs of groups in each element of `compared`."""
    pairs = [pair for groups in compared for pair in combinations(groups, 2)]
    if options.unbiased:
        pairs = [pair for pair in pairs if min(map(len, pair)) > 1]
    if not pairs:
        return rows[0].kept[:0].sum()  # 0 with a graph, so that the gradient is 0, not missing
    gaps = torch.stack([g.mean() - h.mean() for g, h in pairs])
    if options.power == 1:
        return gaps.abs().mean()
    if not options.unbiased:
        return gaps.square().mean()
    # E[(mean of n outcomes)²] = (their expectation)² + variance / n, for each of the two means.
    excess = torch.stack([g.var() / len(g) + h.var() / len(h) for g, h in pairs])
    return (gaps.square() - excess).mean()


def _warn_if_small(
    regularizer: DemographicParity | EqualizedOdds, groups: Mapping[Hashable, Tensor]
) -> None:
    """Warn if the batch has few data of a group, or no second group; once for a regularizer."""
    small = len(groups) < 2 or min(map(len, groups.values())) < ENOUGH  # noqa: PLR2004 - a pair
    if not small or hasattr(regularizer, "_warned"):
        return
    object.__setattr__(regularizer, "_warned", True)
    counts = ", ".join(f"{len(group)} of group {label!r}" for label, group in groups.items())
    counts = counts or "none that has a token"
    warnings.warn(
        f"a batch has few data of a group ({counts}): the gap between their means is mostly "
        f"chance, and training on it reduces the spread within the groups rather than the gap. "
        f"Use batches with at least {ENOUGH} data of each group (regularizer "
        f"{regularizer.name!r}).",
        SmallBatchWarning,
        stacklevel=3,
    )


def _p_value(test: Test, groups: Sequence[Tensor]) -> float:
    samples = [group.tolist() for group in groups]
    if len({outcome for sample in samples for outcome in sample}) == 1:
        return 1.0  # all outcomes are equal; SciPy gives NaN
    if test == "anova" and all(len(sample) == 1 for sample in samples):
        return 1.0  # without variance within groups the F statistic is undefined
    stats = _stats()
    result = (stats.kruskal if test == "kruskal" else stats.f_oneway)(*samples)
    return float(result.pvalue)


def _combined(p_values: Sequence[float]) -> float:
    """Combine independent p-values by Fisher's method: -2 Σ log pᵢ ~ χ² with 2n degrees."""
    return float(_stats().combine_pvalues(p_values).pvalue)


def _stats() -> Any:
    from scipy import stats  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra

    return stats
