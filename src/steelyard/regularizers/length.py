"""Length penalties: beyond a limit, or relative to the other answers of a group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from steelyard.composition.per_datum import PerDatum
from steelyard.gradients.estimators import read_costs, score_gradient
from steelyard.gradients.layout import LogProbs, flatten
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import DatumRow, Source, counted_rows

Scale: TypeAlias = Literal["mean", "range", "std"]


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """Penalise answers that are longer than a limit, softly before it.

    With |y| the number of tokens of a datum that count, its penalty is
    `clamp((|y| - (max_length - buffer)) / buffer, 0, 1)`: 0 up to `max_length - buffer`, then
    rising linearly to 1 at `max_length`. With `buffer=max_length` it is linear from the first
    token. With `correct`, data whose answer is wrong have the penalty 0.

    The value is the mean over data. **The gradient is the score-function estimate**: unbiased
    for that of the expected penalty if the data were sampled from the model being trained; wrapped
    in `TruncatedImportanceSampling(level="sequence", high=None)` also if they were not.

    Usual with `correct` alone, and where most answers are right: without it, accuracy collapses.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `correct`, if that is
    a field.

    Args:
        max_length: the number of tokens from which the penalty is 1.
        buffer: the number of tokens before it over which the penalty rises, at most `max_length`.
        correct: the field of `loss_fn_inputs` with the reward, or a function `(datum, index)`:
            the penalty counts only for data whose reward is at least `threshold`. None: for all.
        threshold: the reward from which an answer is right.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> lps = [torch.zeros(length) for length in (6, 9, 12)]
        >>> penalties, metrics = OverlongPenalty(max_length=10, buffer=4).compute([], lps)
        >>> penalties, metrics["length"]
        (tensor([0.0000, 0.7500, 1.0000], dtype=torch.float64), 9.0)

    References:
        Yu et al. (2025), "DAPO: an open-source LLM reinforcement learning system at scale",
        equation 13 (soft overlong punishment; max_length 20480 and buffer 4096 are theirs).
    """

    max_length: int
    buffer: int
    correct: Source | None = None
    threshold: float = 0.5
    name: ClassVar[str] = "overlong_penalty"
    gradient: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        _options.whole("max_length", self.max_length, 1, self.name)
        _options.whole("buffer", self.buffer, 1, self.name)
        fits = self.buffer <= self.max_length
        _options.require(fits, "buffer", "at most max_length", self.buffer, self.name)
        _check_correct(self)

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]] | Any:
        """Compute the penalty of each datum; the mean `length`, and the fraction `overlong`."""
        rows = counted_rows(data, logprobs)
        if not rows:
            return None
        lengths = _lengths(rows)
        penalties = ((lengths - (self.max_length - self.buffer)) / self.buffer).clamp(0, 1)
        counts = torch.tensor(_right(rows, self.correct, self.threshold))
        metrics = {
            "length": lengths.mean().item(),
            "overlong": (lengths > self.max_length).double().mean().item(),
        }
        return torch.where(counts, penalties, 0.0), metrics

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum | None:
        """Form per datum: see `Separable`."""
        return _per_datum(self, data, shapes)


@dataclass(frozen=True, kw_only=True)
class RelativeLength:
    """Penalise answers that are longer than the others to the same prompt.

    With |y| the number of tokens of a datum that count and m the mean of |y| over its group, the
    penalty of a datum is `(|y| - m) / s`, with s by `scale`: m, the range max - min, or the
    standard deviation of the group's lengths. Shorter ones get a bonus, and the penalties
    of a group add up to 0. With `correct`, m and s are those of the right answers of the group, and
    a wrong answer has the penalty 0, so that right answers, taken together, are not made less
    likely. A datum alone in its group, or in one of equal lengths, has the penalty 0.

    The value, the mean over data, is always 0; the metric `length` shows the effect. **The gradient
    is the score-function estimate**: unbiased for that of the expected penalty of a datum whose
    group is held fixed, if the data were sampled from the model being trained; wrapped in
    `TruncatedImportanceSampling(level="sequence", high=None)` also if they were not.

    Usual with `correct` alone, and where most answers are right: without it, accuracy collapses.

    Reads from each datum: `group`, one number (with tinker's `Datum` as an array, a tensor or
    `TensorData`) or, in a plain mapping, a string; `correct`, if that is a field; `weights`
    (optional), where 0 leaves a token out.

    Args:
        group: the field of `loss_fn_inputs` with the prompt's label, or a function
            `(datum, index)`.
        scale: `"mean"`, `"range"` or `"std"`.
        correct: the field with the reward, or a function `(datum, index)`: only data whose
            reward is at least `threshold` are compared. None: all.
        threshold: the reward from which an answer is right.

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> data = [{"loss_fn_inputs": {"group": 7, "reward": r}} for r in (1.0, 1.0, 0.0)]
        >>> lps = [torch.zeros(length) for length in (10, 30, 90)]
        >>> penalties, metrics = RelativeLength(correct="reward").compute(data, lps)
        >>> penalties * 3 / 2  # (10 - 20) / 20 and (30 - 20) / 20, of three data: see `compute`
        tensor([-0.5000,  0.5000,  0.0000], dtype=torch.float64)

    References:
        Kimi Team (2025), "Kimi k1.5: scaling reinforcement learning with LLMs", section 2.3.3
        (`"range"`, around the middle of the range instead of the mean); Arora & Zanette (2025),
        "Training language models to reason efficiently" (right answers only, by `"std"`).
    """

    group: Source = "group"
    scale: Scale = "mean"
    correct: Source | None = None
    threshold: float = 0.5
    name: ClassVar[str] = "relative_length"
    gradient: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        _options.resolve_source(self, "group")
        _options.one_of("scale", self.scale, ("mean", "range", "std"), self.name)
        _check_correct(self)

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]] | Any:
        """Compute the penalty of each datum, times (n - 1)/n of n data; the mean `length`.

        The score-function estimate divides by n - 1, since it subtracts the mean of the penalties.
        That mean is 0 here, so that the sum over data has to be divided by n.
        """
        rows = counted_rows(data, logprobs)
        if not rows:
            return None
        right = _right(rows, self.correct, self.threshold)
        groups: dict[Hashable, list[int]] = {}
        for row in rows:
            label = row.read_label(self.group)
            if right[row.index]:
                groups.setdefault(label, []).append(row.index)
        lengths = _lengths(rows)
        penalties = torch.zeros_like(lengths)
        for members in groups.values():
            penalties[members] = self._excess(lengths[members])
        metrics = {"length": lengths.mean().item(), "compared": sum(right) / len(right)}
        return penalties * ((len(rows) - 1) / len(rows)), metrics

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum | None:
        """Form per datum: see `Separable`."""
        return _per_datum(self, data, shapes)

    def _excess(self, lengths: Tensor) -> Tensor:
        mean = lengths.mean()
        if self.scale == "mean":
            scale = mean
        elif self.scale == "range":
            scale = lengths.max() - lengths.min()
        else:
            scale = lengths.std(correction=0)
        return torch.where(scale > 0, (lengths - mean) / scale, 0.0)


def _per_datum(
    penalty: OverlongPenalty | RelativeLength, data: Sequence[Any], shapes: Sequence[torch.Size]
) -> PerDatum | None:
    """Form of a length penalty: lengths, and so the score function's factors, do not need a model.

    The factor of each token couples the data by its baseline, and is known before the step.
    """
    layout, flat = flatten([torch.zeros(shape) for shape in shapes])
    computed = penalty.compute(data, layout.split(flat))
    if computed is None:
        return None
    costs, metrics = computed
    factors = score_gradient(penalty.name, read_costs(penalty.name, costs, layout), data, layout)
    factors = factors * len(shapes)  # the mean over data divides it again
    return PerDatum(
        lambda logprobs, cost, factor: cost,  # noqa: ARG005 - the arguments of all functions
        {"cost": list(costs), "factor": list(layout.split(factors))},
        gradient_of=lambda logprobs, cost, factor: factor * logprobs,  # noqa: ARG005
        metrics=metrics,
    )


def _check_correct(penalty: OverlongPenalty | RelativeLength) -> None:
    _options.resolve_source(penalty, "correct", optional=True)
    _options.number("threshold", penalty.threshold, penalty.name)


def _lengths(rows: list[DatumRow]) -> Tensor:
    """Number of tokens of each datum that count, `[n]` in float64."""
    return torch.tensor([row.kept.shape[0] for row in rows], dtype=torch.float64)


def _right(rows: list[DatumRow], correct: Source | None, threshold: float) -> list[bool]:
    """Return for each datum if its answer is right; True for all without `correct`."""
    return [correct is None or row.read_number(correct) >= threshold for row in rows]
