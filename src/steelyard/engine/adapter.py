"""A LoRA adapter: its weights, the gradients gathered for them, and their optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tinker import types
from torch import Tensor, nn

from steelyard.errors import InputError, NonFiniteError, StateError
from steelyard.spec import is_finite, is_whole

# Tinker's: independent of the rank, so that a learning rate found for one rank suits another.
ALPHA = 32


@dataclass(frozen=True)
class LoraSettings:
    """What to train, and how finely.

    Raises:
        InputError: a setting breaks a rule.
    """

    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if not is_whole(self.rank, at_least=1):
            raise InputError(f"rank must be a whole number >= 1, got {self.rank!r}.")
        if self.seed is not None and not (is_whole(self.seed, at_least=0) and self.seed < 2**64):
            raise InputError(
                f"seed must be a whole number from 0 to 2**64 - 1, or None, got {self.seed!r}."
            )
        if not self.groups:
            raise InputError(
                "at least one of train_mlp, train_attn and train_unembed must be True, got none."
            )

    @property
    def groups(self) -> tuple[str, ...]:
        """The parts of the model that are trained."""
        chosen = {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}
        return tuple(group for group, trained in chosen.items() if trained)


class Adapter:
    """The trainable weights of one client.

    Args:
        name: the adapter's in the shared model.
        settings: what is trained.
        parameters: by the key they have in a checkpoint.

    Attributes:
        version: counts the changes of the weights.
    """

    def __init__(
        self, name: str, settings: LoraSettings, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.name = name
        self.settings = settings
        self.parameters = dict(parameters)
        self.version = 0
        self._gradients: list[Tensor] | None = None
        self._optimizer = self._fresh_optimizer()

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights, by key, on the CPU."""
        return {key: p.detach().cpu().clone() for key, p in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """A copy of the gradients gathered since the last step, by key; zeros if there are none."""
        return {
            key: gradient.detach().cpu().clone()
            for key, gradient in zip(self.parameters, self._gathered(), strict=True)
        }

    def gather(self, gradients: Sequence[Tensor | None]) -> None:
        """Add to the gradients gathered so far, all of them or, if one is not finite, none.

        Raises:
            NonFiniteError: one is not.
        """
        found = [
            torch.zeros_like(p) if gradient is None else gradient.to(p.dtype)
            for p, gradient in zip(self.parameters.values(), gradients, strict=True)
        ]
        norm = nn.utils.get_total_norm(found)
        if not bool(torch.isfinite(norm)):
            raise NonFiniteError(
                f"the gradient of the weights must be finite, got the norm {norm.item()}: "
                f"nothing was added; look for log-probs or ratios that overflow.",
                kind="nan" if bool(norm.isnan()) else "inf",
            )
        if self._gradients is None:
            self._gradients = found
        else:
            torch._foreach_add_(self._gradients, found)

    def step(self, params: types.AdamParams) -> float:
        """One AdamW step with the gathered gradients; their norm before clipping."""
        for group in self._optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        gradients = self._gathered()
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        try:
            norm = nn.utils.get_total_norm(gradients)
            if params.grad_clip_norm > 0:
                nn.utils.clip_grads_with_norm_(
                    self.parameters.values(), params.grad_clip_norm, norm
                )
            self._optimizer.step()
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        self._gradients = None
        self.version += 1
        return norm.item()

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor] | None) -> None:
        """Take weights, and the optimizer's moments or fresh ones; gathered gradients go.

        Raises:
            StateError: they are not those of an adapter like this one.
        """
        _check_alike("weights", weights, self.parameters)
        if moments is not None:
            _check_alike("optimizer", moments, self._moments_like())
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(weights[key])
        self._gradients = None
        self._optimizer = self._fresh_optimizer()
        for key, parameter in self.parameters.items() if moments else ():
            self._optimizer.state[parameter] = {
                name: moments[f"{name}/{key}"].to(like, copy=True)  # type: ignore[index]  # not None
                for name, like in self._state_like(parameter).items()
            }
        self.version += 1

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state, by name and key; empty before the first step."""
        return {
            f"{name}/{key}": value.detach().cpu().clone()
            for key, parameter in self.parameters.items()
            for name, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _gathered(self) -> list[Tensor]:
        if self._gradients is not None:
            return self._gradients
        return [torch.zeros_like(p) for p in self.parameters.values()]

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters.values(), weight_decay=0.0)

    def _moments_like(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": like
            for key, parameter in self.parameters.items()
            for name, like in self._state_like(parameter).items()
        }

    @staticmethod
    def _state_like(parameter: Tensor) -> dict[str, Tensor]:
        return {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}


def check_adam(params: object) -> types.AdamParams:
    """`params`, if they are AdamW settings that can be used.

    Raises:
        InputError: they are not.
    """
    if not isinstance(params, types.AdamParams):
        raise InputError(
            f"optim_params must be tinker.types.AdamParams, the one optimizer the engine has, "
            f"got {params!r}."
        )
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        kept = is_finite(value) and value >= 0 and (not name.startswith("beta") or value < 1)
        if not kept:
            rule = "in [0, 1)" if name.startswith("beta") else ">= 0 and finite"
            raise InputError(f"{name} must be {rule}, got {value!r}.")
    return params


def _check_alike(what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    if found.keys() != wanted.keys():
        odd = sorted(found.keys() ^ wanted.keys())
        raise StateError(
            f"{what} must be those of a model and rank like this one, and {len(odd)} names differ, "
            f"{odd[0]!r} among them."
        )
    for key, tensor in wanted.items():
        if found[key].shape != tensor.shape:
            raise StateError(
                f"{what}[{key!r}] must have the shape {list(tensor.shape)}, "
                f"got {list(found[key].shape)}."
            )
