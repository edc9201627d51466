"""The losses a training client knows by name, with Tinker's definitions: sums, never means.

cross_entropy         -sum(logprobs * weights)
importance_sampling   -sum(ratio * advantages),  ratio = exp(logprobs - sampling logprobs)
ppo                   -sum(min(ratio * advantages, clip(ratio, low, high) * advantages))
cispo                 -sum(clip(ratio, low, high), held fixed * logprobs * advantages)
dro                   -sum(logprobs * advantages - beta/2 * (log ratio)^2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.errors import InputError
from steelyard.spec import is_finite

# (log-probs, the fields of the datum, the settings) -> the loss of each token, shaped alike
Elementwise = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss by name.

    Attributes:
        name: what callers say.
        elementwise: the loss of each token.
        fields: what it reads from a datum, and what stands for a field that is missing.
        settings: what `loss_fn_config` may hold, and the defaults.
    """

    name: str
    elementwise: Elementwise
    fields: Mapping[str, float | None]
    settings: Mapping[str, float]


def find_loss(
    name: str, config: Mapping[str, float | str] | None
) -> tuple[Loss, Mapping[str, float]]:
    """The loss of that name, and its settings.

    Raises:
        InputError: there is none, or a setting is unknown or not a number.
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
    return -torch.minimum(ratio * advantages, _clipped(ratio, settings) * advantages)


def _cispo(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    ratio = _clipped(_ratio(logprobs, fields), settings).detach()
    return -ratio * logprobs * fields["advantages"]


def _dro(logprobs: Tensor, fields: Mapping[str, Tensor], settings: Mapping[str, float]) -> Tensor:
    distance = (logprobs - fields["logprobs"]).square()
    return -(logprobs * fields["advantages"] - 0.5 * settings["beta"] * distance)


def _ratio(logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs - fields["logprobs"])


def _clipped(ratio: Tensor, settings: Mapping[str, float]) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])


_SAMPLED = {"logprobs": None, "advantages": None}
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", _cross_entropy, {"weights": 1.0}, {}),
        Loss("importance_sampling", _importance_sampling, _SAMPLED, {}),
        Loss("ppo", _ppo, _SAMPLED, _CLIPS),
        Loss("cispo", _cispo, _SAMPLED, _CLIPS),
        Loss("dro", _dro, _SAMPLED, {"beta": 0.05}),
    )
}
