"""Regularizers that remember from batch to batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import SpecError, StateError
from steelyard.gradients import LogProbs
from steelyard.regularizers import _options
from steelyard.regularizers._tokens import mean, rows_of
from steelyard.spec import Regularizer, Stateful, build, entry_point, is_async, is_finite, rejects


class EMADrift:
    """Penalises drift of the mean log-prob from its exponential average over past batches.

    `(m - e)²` with m the mean log-prob of the batch's tokens and e the average before this
    batch; then `e ← decay · e + (1 - decay) · m`. The first batch starts the average at its own
    m and costs nothing.

    The gradient is exact, with e a constant.

    Reads from each datum: `weights` (optional), where 0 leaves a token out.

    It has a state, one update per call: `gradient="numerical"`, which is many calls, is not
    for it. A batch without a token that counts changes nothing.

    Args:
        decay: how much of the average is kept, in [0, 1].

    Raises:
        SpecError: an option breaks its rule.

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

    def __init__(self, *, decay: float = 0.99) -> None:
        self.decay = _options.fraction("decay", decay, self.name)
        self._average: float | None = None

    def __repr__(self) -> str:
        return f"EMADrift(decay={self.decay})"

    def compute(self, data: Any, logprobs: LogProbs) -> tuple[Tensor, dict[str, float]]:
        """The penalty of a batch, its `mean` log-prob and the `average` it is held to."""
        flat = torch.cat([row.kept.reshape(-1) for row in rows_of(data, logprobs, classes=True)])
        current = mean(flat)
        now = current.item()
        before = now if self._average is None else self._average
        # What is not finite fails the term, and must not stay in the average.
        if flat.numel() and is_finite(now):
            self._average = self.decay * before + (1 - self.decay) * now
        return (current - before).square(), {"mean": now, "average": before}

    def state_dict(self) -> dict[str, float | None]:
        """The average; None before the first batch."""
        return {"average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            StateError: it is something else.
        """
        average = _only(state, {"average"}, self.name)["average"]
        if average is not None and not is_finite(average):
            raise StateError(
                f"average must be a finite number or None, got {average!r} (regularizer "
                f"{self.name!r})."
            )
        self._average = average


class Adaptive:
    """Scales a regularizer so that its value is held at a target, as adaptive KL control does.

    `multiplier · regularizer`; after each batch
    `multiplier ← clamp(multiplier · (1 + rate · clamp((value - target)/|target|, ±clip)))`. A
    value above its target raises the multiplier, one below lowers it.

    The gradient is that of the wrapped regularizer, times the multiplier.

    Reads from each datum: what the wrapped regularizer does.

    It has a state, one update per call: `gradient="numerical"`, which is many calls, is not for
    it; and it never runs in a process: what would run there by itself runs in a thread.

    Args:
        regularizer: what to scale: an object, a function, the name of one, or
            `{"fn": ..., "options": {...}}`. It may be async.
        target: the value to hold, not 0.
        rate: how fast the multiplier follows, above 0.
        clip: the largest relative error that counts, above 0.
        initial: the multiplier of the first batch.
        minimum: what the multiplier never falls below.
        maximum: what it never rises above.

    Raises:
        SpecError: an option breaks its rule.
        RegistryError: `regularizer` names nothing.

    Example:
        >>> size = Adaptive(regularizer="l1", target=1.0, rate=1.0)
        >>> for _ in range(3):
        ...     loss, metrics = size.compute([], [torch.tensor([-3.0])])
        ...     print(f"{loss.item():.2f} {metrics}")
        3.00 {'observed': 3.0, 'multiplier': 1.0}
        3.60 {'observed': 3.0, 'multiplier': 1.2}
        4.32 {'observed': 3.0, 'multiplier': 1.44}

    References:
        Ziegler et al. (2019), "Fine-tuning language models from human preferences".
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
        self._inner = _made(regularizer)
        self.name = f"adaptive_{getattr(self._inner, 'name', 'term')}"
        self.target = _options.number("target", target, self.name)
        _options.require(self.target != 0, "target", "a number other than 0", target, self.name)
        self.rate = _options.positive("rate", rate, self.name)
        self.clip = _options.positive("clip", clip, self.name)
        self.minimum = _options.positive("minimum", minimum, self.name)
        self.maximum = _options.at_least("maximum", maximum, self.minimum, self.name)
        self.multiplier = _options.positive("initial", initial, self.name)
        inside = self.minimum <= self.multiplier <= self.maximum
        rule = f"between minimum {self.minimum:g} and maximum {self.maximum:g}"
        _options.require(inside, "initial", rule, initial, self.name)

    def __repr__(self) -> str:
        return f"Adaptive(regularizer={self._inner!r}, target={self.target})"

    @property
    def gradient(self) -> str:
        """How the wrapped regularizer is differentiated."""
        return str(getattr(self._inner, "gradient", "auto"))

    @property
    def needs(self) -> tuple[str, ...]:
        """What the wrapped regularizer reads beyond log-probs."""
        needs: tuple[str, ...] = getattr(self._inner, "needs", ())
        return needs

    @property
    def compute(self) -> Any:
        """The scaled penalty of a batch: a function, async if the wrapped regularizer is."""
        return self._acompute if is_async(self._inner) else self._compute

    def state_dict(self) -> dict[str, Any]:
        """The multiplier, and what the wrapped regularizer remembers."""
        inner = self._inner.state_dict() if isinstance(self._inner, Stateful) else None
        return {"multiplier": self.multiplier, "regularizer": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave.

        Raises:
            StateError: it is something else.
        """
        state = _only(state, {"multiplier", "regularizer"}, self.name)
        multiplier, inner = state["multiplier"], state["regularizer"]
        if not is_finite(multiplier) or not self.minimum <= multiplier <= self.maximum:
            raise StateError(
                f"multiplier must be a number between {self.minimum:g} and {self.maximum:g}, got "
                f"{multiplier!r} (regularizer {self.name!r})."
            )
        if isinstance(self._inner, Stateful):
            self._inner.load_state_dict(inner)
        self.multiplier = float(multiplier)

    def _compute(self, data: Any, logprobs: LogProbs, **options: Any) -> Any:
        return self._scaled(entry_point(self._inner)(data, logprobs, **options))

    async def _acompute(self, data: Any, logprobs: LogProbs, **options: Any) -> Any:
        return self._scaled(await entry_point(self._inner)(data, logprobs, **options))

    def _scaled(self, returned: Any) -> tuple[Any, dict[str, float]]:
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        # One number, or one penalty per datum, of which the value is the mean.
        penalty = torch.as_tensor(loss)
        penalty = penalty if penalty.is_floating_point() else penalty.double()
        observed = penalty.detach().double().mean().item()
        used = self.multiplier
        if is_finite(observed):
            error = (observed - self.target) / abs(self.target)
            factor = 1 + self.rate * min(max(error, -self.clip), self.clip)
            self.multiplier = min(max(used * factor, self.minimum), self.maximum)
        return penalty * used, {**(metrics or {}), "observed": observed, "multiplier": used}


def _made(regularizer: Any) -> Any:
    """The regularizer that an option describes."""
    if isinstance(regularizer, Mapping):
        unknown = sorted(set(regularizer) - {"fn", "options"})
        if unknown or "fn" not in regularizer:
            raise SpecError(
                f"regularizer must have the fields 'fn' and, if need be, 'options', got "
                f"{sorted(map(str, regularizer))} (regularizer 'adaptive')."
            )
        fn, options = regularizer["fn"], dict(regularizer.get("options") or {})
    else:
        fn, options = regularizer, {}
    if isinstance(fn, str):
        fn, options = build(fn, options)
    rule = "a regularizer, or the name of one"
    _options.require(
        callable(fn) or isinstance(fn, Regularizer), "regularizer", rule, fn, "adaptive"
    )
    why = rejects(entry_point(fn), options)
    if why is not None:
        raise SpecError(
            f"regularizer must accept (data, logprobs) and the options {list(options)}: {why} "
            f"(regularizer 'adaptive')."
        )
    return functools.partial(entry_point(fn), **options) if options else fn


def _only(state: Any, keys: set[str], name: str) -> Mapping[str, Any]:
    if not isinstance(state, Mapping) or set(state) != keys:
        got = sorted(map(str, state)) if isinstance(state, Mapping) else state
        raise StateError(
            f"state must hold exactly {sorted(keys)}, got {got!r} (regularizer {name!r})."
        )
    return state
