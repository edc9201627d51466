"""Losses that a training client knows by name, with Tinker's definitions: sums, never means.

With `logprobs` of the target tokens under the trained policy, `q` their log-probs when they were
sampled (the field `logprobs` of the datum), `A` the advantages and `ratio = exp(logprobs - q)`:

cross_entropy         -sum(logprobs * weights)
importance_sampling   -sum(ratio * A)
ppo                   -sum(min(ratio * A, clip(ratio, low, high) * A))
cispo                 -sum(stop_gradient(clip(ratio, low, high)) * logprobs * A)
dro                   -sum(logprobs * A - beta / 2 * (logprobs - q)^2)

The engine trains with them, and `NamedBaseLoss` is one of them as the base loss of a pipeline.

On the engine `loss_fn_config` may also hold a `"temperature"`, which is no setting of the loss: the
log-probs are those of `softmax(logits / temperature)` then.

PPO: Schulman et al., 2017, arXiv:1707.06347. CISPO: MiniMax-M1, 2025, arXiv:2506.13585. DRO:
Richemond et al., 2024, arXiv:2405.19107.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from steelyard.composition.per_datum import PerDatum
from steelyard.errors import InputError
from steelyard.gradients import LogProbs, as_tensor, loss_fn_input
from steelyard.spec import is_finite

# Key of `loss_fn_config` for the temperature of the policy.
TEMPERATURE = "temperature"
# (log-probs [T] or [T, K], fields of the datum, settings) -> loss of each token, in that shape
Elementwise = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


@dataclass(frozen=True)
class NamedLoss:
    """A loss that callers choose by name.

    Attributes:
        name: its name in `loss_fn`.
        elementwise: computes the loss of each token.
        fields: names of the fields that it reads from a datum, each with the default for a datum
            without it; None: required.
        settings: keys that `loss_fn_config` may hold, with their defaults.
    """

    name: str
    elementwise: Elementwise
    fields: Mapping[str, float | None]
    settings: Mapping[str, float]


def loss_names() -> tuple[str, ...]:
    """Names of the losses that are defined here."""
    return tuple(LOSSES)


def find_loss(
    name: str, config: Mapping[str, float | str] | None, *, argument: str = "loss_fn_config"
) -> tuple[NamedLoss, Mapping[str, float]]:
    """Find a loss and complete its settings with the defaults.

    Args:
        name: name of the loss.
        config: its settings.
        argument: what the user calls the settings, for errors.

    Raises:
        InputError: the name is unknown, or a setting is unknown, no finite number, or a lower
            clip above the upper one.
    """
    loss = LOSSES.get(name) if isinstance(name, str) else None
    if loss is None:
        raise InputError(f"loss_fn must be one of {', '.join(LOSSES)}, got {name!r}.")
    settings = dict(loss.settings)
    for key, value in (config or {}).items():
        if key not in settings:
            raise InputError(
                f"{argument} of {name} may hold {sorted(settings)}, got the key {key!r}."
            )
        if not is_finite(value):
            raise InputError(f"{argument}[{key!r}] must be a finite number, got {value!r}.")
        settings[key] = float(value)
    low, high = (settings.get(f"clip_{end}_threshold", 0.0) for end in ("low", "high"))
    if low > high:
        raise InputError(
            f"clip_low_threshold must be at most clip_high_threshold, got {low:g} and {high:g} "
            f"({argument} of {name})."
        )
    return loss, settings


def split_temperature(
    config: Mapping[str, float | str] | None,
) -> tuple[float, dict[str, float | str]]:
    """Split `loss_fn_config` into the temperature of the policy, 1 by default, and the settings.

    Raises:
        InputError: the temperature is no finite number > 0.
    """
    settings = dict(config or {})
    temperature = settings.pop(TEMPERATURE, 1.0)
    if not is_finite(temperature) or not temperature > 0:  # type: ignore[operator]  # a number
        raise InputError(
            f"loss_fn_config[{TEMPERATURE!r}] must be a finite number > 0, got {temperature!r}."
        )
    return float(temperature), settings


@dataclass(frozen=True)
class NamedBaseLoss:
    """A named loss as the base loss of a pipeline: its sum over all tokens of the batch.

    Attributes:
        loss: the loss.
        settings: its settings, complete.

    Example:
        >>> data = [{"loss_fn_inputs": {"logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}}]
        >>> base = NamedBaseLoss.of("importance_sampling")
        >>> base.compute(data, [torch.tensor([-1.0, -2.0])])
        tensor(0., dtype=torch.float64)
    """

    loss: NamedLoss
    settings: Mapping[str, float]

    @classmethod
    def of(cls, name: str, config: Mapping[str, float | str] | None = None) -> Self:
        """Build it from the arguments `loss_fn` and `loss_fn_config` of a training client.

        Raises:
            InputError: as `find_loss`.
        """
        return cls(*find_loss(name, config))

    def __hash__(self) -> int:
        return hash((self.loss.name, *sorted(self.settings.items())))

    @property
    def reads_fields(self) -> tuple[str, ...]:
        """Fields that a datum must have."""
        return tuple(name for name, default in self.loss.fields.items() if default is None)

    def check(self, data: Sequence[Any]) -> None:
        """Check that each datum has the fields that the loss reads.

        Raises:
            InputError: a field is missing; or a datum has one that changes the loss on a server in
                a way that is not known here.
        """
        for index, datum in enumerate(data):
            for name in self.reads_fields:
                if loss_fn_input(datum, name) is None:
                    raise InputError(
                        f"data[{index}].loss_fn_inputs must hold {name!r} for {self.loss.name}, "
                        f"got none.",
                        datum=index,
                    )
            for name in _SERVER_FIELDS:
                if loss_fn_input(datum, name) is not None:
                    raise InputError(
                        f"data[{index}].loss_fn_inputs must not hold {name!r} beside terms: only "
                        f"the server knows what it does to {self.loss.name}. Use loss_fn_config.",
                        datum=index,
                    )

    def elementwise(self, data: Sequence[Any], logprobs: LogProbs) -> list[Tensor]:
        """Compute the loss of each token, in the shapes of the log-probs.

        Raises:
            InputError: a field does not have the shape of the log-probs.
        """
        rows = [logprobs] if isinstance(logprobs, Tensor) else list(logprobs)
        # Elementwise, so all data go through it as one vector.
        flat = torch.cat([row.reshape(-1) for row in rows])
        fields = {
            name: torch.cat(
                [_field(index, data[index], name, row, default) for index, row in enumerate(rows)]
            )
            for name, default in self.loss.fields.items()
        }
        losses = self.loss.elementwise(flat, fields, self.settings)
        split = torch.split(losses, [row.numel() for row in rows])
        return [part.reshape(row.shape) for part, row in zip(split, rows, strict=True)]

    def compute(self, data: Sequence[Any], logprobs: LogProbs) -> Tensor:
        """Compute the loss of a batch, summed in float64: a batch may have very many tokens."""
        losses = self.elementwise(data, logprobs)
        return torch.cat([each.reshape(-1) for each in losses]).sum(dtype=torch.float64)

    def per_datum(self, data: Sequence[Any], shapes: Sequence[torch.Size]) -> PerDatum:
        """Form per datum: see `Separable`.

        Raises:
            InputError: a field does not have the shape of the log-probs.
        """
        fields = {
            f"field_{name}": [
                _field(index, data[index], name, torch.empty(shape), default).reshape(shape)
                for index, shape in enumerate(shapes)
            ]
            for name, default in self.loss.fields.items()
        }
        return PerDatum(self._elementwise, fields, "sum", all_tokens=True)

    def _elementwise(self, logprobs: Tensor, **fields: Tensor) -> Tensor:
        named = {name.removeprefix("field_"): value for name, value in fields.items()}
        return self.loss.elementwise(logprobs, named, self.settings)


def _field(index: int, datum: Any, name: str, logprobs: Tensor, default: float | None) -> Tensor:
    """Field of a datum as a vector, or its default."""
    given = loss_fn_input(datum, name)
    if given is None and default is not None:
        return torch.full_like(logprobs, default).reshape(-1)
    values = as_tensor(given)
    if values.shape != logprobs.shape:
        raise InputError(
            f"data[{index}].loss_fn_inputs[{name!r}] must have the shape of the log-probs, "
            f"{list(logprobs.shape)}, got {list(values.shape)}.",
            datum=index,
        )
    return values.to(logprobs).reshape(-1)


def _cross_entropy(
    logprobs: Tensor, fields: Mapping[str, Tensor], _: Mapping[str, float]
) -> Tensor:
    return -logprobs * fields["weights"]


def _importance_sampling(
    logprobs: Tensor, fields: Mapping[str, Tensor], _: Mapping[str, float]
) -> Tensor:
    return -_ratio(logprobs, fields) * fields["advantages"]


def _ppo(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    ratio, advantages = _ratio(logprobs, fields), fields["advantages"]
    # The minimum is the pessimistic bound: for A > 0 no gain from a ratio above `high`, for A < 0
    # none from a ratio below `low`. There the clipped branch is constant and the gradient is 0.
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _cispo(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    # The ratio is a fixed weight: every token keeps the gradient -ratio * A, where PPO's clipping
    # would take the token out of the update.
    ratio = _clipped(_ratio(logprobs, fields), settings).detach()
    return -ratio * logprobs * fields["advantages"]


def _dro(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    squared_log_ratio = (logprobs - fields["logprobs"]).square()
    return -(logprobs * fields["advantages"] - 0.5 * settings["beta"] * squared_log_ratio)


def _ratio(logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs - fields["logprobs"])


def _clipped(ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


_POLICY_FIELDS = {"logprobs": None, "advantages": None}
# Fields that the SDK sends as numbers of each token, and whose meaning only the server knows.
_SERVER_FIELDS = ("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")
_PPO_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# No lower bound: a ratio below 1 then weighs a token as importance sampling does. Tinker's default.
_CISPO_CLIPS = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
LOSSES = {
    loss.name: loss
    for loss in (
        NamedLoss("cross_entropy", _cross_entropy, {"weights": 1.0}, {}),
        NamedLoss("importance_sampling", _importance_sampling, _POLICY_FIELDS, {}),
        NamedLoss("ppo", _ppo, _POLICY_FIELDS, _PPO_CLIPS),
        NamedLoss("cispo", _cispo, _POLICY_FIELDS, _CISPO_CLIPS),
        NamedLoss("dro", _dro, _POLICY_FIELDS, {"beta": 0.05}),
    )
}
