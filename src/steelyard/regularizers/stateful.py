"""Regularizers with state: `EMADrift` and the controller `Adaptive`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import StateError
from steelyard.gradients.layout import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import DatumRow, counted_rows
from steelyard.regularizers._wrapped import Wrapper, build_wrapped, then
from steelyard.spec.checks import is_finite
from steelyard.spec.protocol import ChoosesNeeds, Stateful, entry_point


class EMADrift:
    """Penalise drift of the mean log-prob from its exponential moving average (EMA).

    `(m - e)²` with m the mean log-prob over all tokens of the batch (and all classes of `[T, K]`)
    and e the average before this batch; then `e ← decay · e + (1 - decay) · m`. The first batch
    sets e to its own m, so its penalty is 0.

    The gradient is exact, with e a constant: 2(m - e) / N for each of the N log-probs.

    Reads from each datum: `weights` (optional), where 0 leaves a token out; `measure` also
    `reference_logprobs`, which a run adds to its held-out data.

    Each call updates the state once, so `gradient="numerical"`, which makes many calls, must not be
    used. A batch without a token that counts is left out, and does not change the state.

    On held-out data, `measure` gives the drift from the base model instead: the moving average
    belongs to the training batches, and does not exist in a run without this term.

    Args:
        decay: weight of the old average, in [0, 1].

    Raises:
        SpecError: an option is invalid.

    Example:
        >>> drift = EMADrift(decay=0.5)
        >>> for lp in (-1.0, -3.0, -2.0):
        ...     loss, metrics = drift.compute([], [torch.tensor([lp])])
        ...     print(loss.item(), metrics)
        0.0 {'mean': -1.0, 'average': -1.0}
        4.0 {'mean': -3.0, 'average': -1.0}
        0.0 {'mean': -2.0, 'average': -2.0}
    """

    name = "ema_drift"
    measured_against = "reference_logprobs"

    def __init__(self, *, decay: float = 0.99) -> None:
        self.decay = _options.fraction("decay", decay, self.name)
        self._average: float | None = None

    def __repr__(self) -> str:
        return f"EMADrift(decay={self.decay})"

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]] | Any:
        """Compute the penalty of a batch; its `mean` log-prob m and the `average` e before it."""
        rows = counted_rows(data, logprobs, classes=True)
        if not rows:
            return None
        current = _kept(rows).mean()
        observed = current.item()
        before = observed if self._average is None else self._average
        # A mean that is not finite fails this call, but must not spoil the average for later ones.
        if is_finite(observed):
            self._average = self.decay * before + (1 - self.decay) * observed
        return (current - before).square(), {"mean": observed, "average": before}

    def measure(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]] | Any:
        """Drift from the base model, `(m - r)²` with r the mean of `reference_logprobs`.

        It neither reads nor changes the moving average.

        Raises:
            InputError: a datum has no `reference_logprobs`, or in another shape.
        """
        rows = counted_rows(data, logprobs, classes=True)
        if not rows:
            return None
        reference = torch.cat([row.read_per_token(self.measured_against) for row in rows]).mean()
        current = _kept(rows).mean()
        metrics = {"mean": current.item(), "reference": reference.item()}
        return (current - reference).square(), metrics

    def state_dict(self) -> dict[str, float | None]:
        """State to save: the average, None before the first batch."""
        return {"average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            StateError: it has other keys or values out of range.
        """
        average = _check_keys(state, {"average"}, self.name)["average"]
        if average is not None and not is_finite(average):
            raise StateError(
                f"average must be a finite number or None, got {average!r} (regularizer "
                f"{self.name!r})."
            )
        self._average = average


class Adaptive(Wrapper):
    """Scale a regularizer to keep its value at a target, as in adaptive KL control.

    The loss is `λ · value` with the current multiplier λ. After each batch a proportional
    controller updates it:

    * error `e = clamp((value - target) / |target|, ±clip)`,
    * `λ ← clamp(λ · (1 + rate · e), minimum, maximum)`.

    A value above its target raises λ, one below lowers it, also for a negative target.

    The gradient is that of the wrapped regularizer, times λ, with λ a constant.

    Reads from each datum: the fields of the wrapped regularizer.

    Each call updates the state once, so `gradient="numerical"`, which makes many calls, must not be
    used. A batch for which the wrapped regularizer returns None is left out, and does not change
    λ. On held-out data the wrapped regularizer is measured, without λ: runs with another λ, or
    without this term, can be compared. It does not run in a process: a wrapped regularizer that
    prefers one runs in a thread.

    Args:
        regularizer: the regularizer to scale: an object, a function, a registered name, or
            `{"fn": ..., "options": {...}}`. It may be async.
        target: the target value, not 0.
        rate: gain of the controller, above 0.
        clip: the relative error to which larger ones are clamped, above 0; rate · clip is below 1.
        initial: λ of the first batch.
        minimum: lower bound of λ, above 0.
        maximum: upper bound of λ.

    Raises:
        SpecError: an option is invalid.
        RegistryError: `regularizer` is a name that is not registered.

    Example:
        >>> size = Adaptive(regularizer="l2", target=1.0, rate=1.0)
        >>> for _ in range(3):
        ...     loss, metrics = size.compute([], [torch.tensor([-2.0])])
        ...     print(f"{loss.item():.2f} {metrics}")
        4.00 {'observed': 4.0, 'multiplier': 1.0}
        4.80 {'observed': 4.0, 'multiplier': 1.2}
        5.76 {'observed': 4.0, 'multiplier': 1.44}

    References:
        Ziegler et al. (2019), "Fine-tuning language models from human preferences", section 2.2
        (rate 0.1 and clip 0.2 are theirs).
    """

    def __init__(
        self,
        *,
        regularizer: Any,
        target: float,
        rate: float = 0.1,
        clip: float = 0.2,
        initial: float = 1.0,
        minimum: float = 1e-4,
        maximum: float = 1e4,
    ) -> None:
        self.name = "adaptive"
        self.regularizer, self.call_options = build_wrapped(regularizer, self.name)
        self.name = f"adaptive_{getattr(self.regularizer, 'name', 'term')}"
        self.target = _options.number("target", target, self.name)
        _options.require(self.target != 0, "target", "a number other than 0", target, self.name)
        self.rate = _options.positive("rate", rate, self.name)
        self.clip = _options.positive("clip", clip, self.name)
        settles = self.rate * self.clip < 1
        _options.require(settles, "rate", "below 1 / clip, or λ may drop to 0", rate, self.name)
        self.minimum = _options.positive("minimum", minimum, self.name)
        self.maximum = _options.at_least("maximum", maximum, self.minimum, self.name)
        self.multiplier = _options.positive("initial", initial, self.name)
        inside = self.minimum <= self.multiplier <= self.maximum
        rule = f"between minimum {self.minimum:g} and maximum {self.maximum:g}"
        _options.require(inside, "initial", rule, initial, self.name)

    def __repr__(self) -> str:
        return f"Adaptive(regularizer={self.regularizer!r}, target={self.target})"

    @property
    def needs(self) -> tuple[str, ...]:
        """Extra inputs of the wrapped regularizer, such as `"logits"`."""
        needs: tuple[str, ...] = getattr(self.regularizer, "needs", ())
        return needs

    def needs_for(self, data: Any, gives: Collection[str], *, own: bool = False) -> tuple[str, ...]:
        """Extra inputs that the wrapped regularizer reads with these data."""
        wrapped = self.regularizer
        return wrapped.needs_for(data, gives, own=own) if isinstance(wrapped, ChoosesNeeds) else ()

    def state_dict(self) -> dict[str, Any]:
        """State to save: the multiplier, and the state of the wrapped regularizer."""
        wrapped = self.regularizer
        state = wrapped.state_dict() if isinstance(wrapped, Stateful) else None
        return {"multiplier": self.multiplier, "regularizer": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            StateError: it has other keys or values out of range.
        """
        state = _check_keys(state, {"multiplier", "regularizer"}, self.name)
        multiplier = state["multiplier"]
        if not is_finite(multiplier) or not self.minimum <= multiplier <= self.maximum:
            raise StateError(
                f"multiplier must be a number between {self.minimum:g} and {self.maximum:g}, got "
                f"{multiplier!r} (regularizer {self.name!r})."
            )
        if isinstance(self.regularizer, Stateful):
            self.regularizer.load_state_dict(state["regularizer"])
        self.multiplier = float(multiplier)

    def _compute(self, data: Any, logprobs: LogProbs, **options: Any) -> Any:
        fn = entry_point(self.regularizer)
        return then(fn(data, logprobs, **self.call_options, **options), self._scaled)

    async def _acompute(self, data: Any, logprobs: LogProbs, **options: Any) -> Any:
        return await self._compute(data, logprobs, **options)

    def _scaled(self, returned: Any) -> tuple[Any, dict[str, float]]:
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        if loss is None:  # nothing to measure: λ stays as it is
            return None, metrics or {}
        # A scalar, or with gradient="score" one penalty per datum, whose mean is the value.
        penalty = torch.as_tensor(loss)
        penalty = penalty if penalty.is_floating_point() else penalty.double()
        observed = penalty.detach().double().mean().item()
        used = self.multiplier  # this batch is scaled by the multiplier from before the update
        if is_finite(observed):
            error = (observed - self.target) / abs(self.target)
            factor = 1 + self.rate * min(max(error, -self.clip), self.clip)
            self.multiplier = min(max(used * factor, self.minimum), self.maximum)
        return penalty * used, {**(metrics or {}), "observed": observed, "multiplier": used}


def _kept(rows: Sequence[DatumRow]) -> Tensor:
    """All log-probs of the unmasked tokens, flattened."""
    return torch.cat([row.kept.reshape(-1) for row in rows])


def _check_keys(state: Any, keys: set[str], name: str) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or set(state) != keys:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else state
        raise StateError(
            f"state must hold exactly {sorted(keys)}, got {got!r} (regularizer {name!r})."
        )
    return state
