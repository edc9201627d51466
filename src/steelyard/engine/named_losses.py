"""Losses that a training client knows by name, with Tinker's definitions: sums, never means.

With `logprobs` of the target tokens under the trained policy, `q` their log-probs when they were
sampled (the field `logprobs` of the datum), `A` the advantages and `ratio = exp(logprobs - q)`:

cross_entropy         -sum(logprobs * weights)
importance_sampling   -sum(ratio * A)
ppo                   -sum(min(ratio * A, clip(ratio, low, high) * A))
cispo                 -sum(stop_gradient(clip(ratio, low, high)) * logprobs * A)
dro                   -sum(logprobs * A - beta / 2 * (logprobs - q)^2)

PPO: Schulman et al., 2017, arXiv:1707.06347. CISPO: MiniMax-M1, 2025, arXiv:2506.13585. DRO:
Richemond et al., 2024, arXiv:2405.19107.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.errors import InputError
from steelyard.spec import is_finite

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


def find_loss(
    name: str, config: Mapping[str, float | str] | None
) -> tuple[NamedLoss, Mapping[str, float]]:
    """Find a loss and complete its settings with the defaults.

    Raises:
        InputError: the name is unknown, or a setting is unknown or no finite number.
    """
    loss = LOSSES.get(name) if isinstance(name, str) else None
    if loss is None:
        raise InputError(f"loss_fn must be one of {', '.join(LOSSES)}, got {name!r}.")
    settings = dict(loss.settings)
    for key, value in (config or {}).items():
        if key not in settings:
            raise InputError(
                f"loss_fn_config of {name} may hold {sorted(settings)}, got the key {key!r}."
            )
        if not is_finite(value):
            raise InputError(f"loss_fn_config[{key!r}] must be a finite number, got {value!r}.")
        settings[key] = float(value)
    return loss, settings


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
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    loss.name: loss
    for loss in (
        NamedLoss("cross_entropy", _cross_entropy, {"weights": 1.0}, {}),
        NamedLoss("importance_sampling", _importance_sampling, _POLICY_FIELDS, {}),
        NamedLoss("ppo", _ppo, _POLICY_FIELDS, _CLIPS),
        NamedLoss("cispo", _cispo, _POLICY_FIELDS, _CLIPS),
        NamedLoss("dro", _dro, _POLICY_FIELDS, {"beta": 0.05}),
    )
}
