"""A LoRA adapter: its weights, their accumulated gradients, and their optimizer.

LoRA (Hu et al., 2021, arXiv:2106.09685) adds to each chosen layer `y = W x` a trained product of
two thin matrices, `y = W x + (alpha / rank) B A x`, with `A: [rank, in]` and `B: [out, rank]`. `B`
starts at zero, so that a fresh adapter does not change the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tinker import types
from torch import Tensor, nn

from steelyard.errors import InputError, NonFiniteError, StateError
from steelyard.spec import is_whole

# As Tinker has it: alpha does not grow with the rank, so the scale alpha / rank makes up for the
# number of added components, and a learning rate found for one rank suits another.
ALPHA = 32
# AdamW divides by sqrt(v) + eps. A gradient of 0 has v = 0, as that of A in the first step, when B
# is 0; with an eps that float32 rounds to 0, the weight would become 0 / 0.
_LEAST_EPS = 1e-30


@dataclass(frozen=True)
class LoraSettings:
    """Layers that an adapter trains, its rank and its seed.

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
        """Groups of layers that are trained: `"attn"`, `"mlp"`, `"unembed"`."""
        trained = {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}
        return tuple(group for group, is_trained in trained.items() if is_trained)


class Adapter:
    """Trainable weights of one client, with their gradients and their AdamW optimizer.

    Gradients of several calls accumulate as a sum until `step` uses and clears them.

    Args:
        name: the adapter's name in the shared model.
        settings: its layers, rank and seed.
        parameters: the LoRA matrices by the key that they have in a checkpoint.

    Attributes:
        version: number of changes of the weights, by which an old autograd graph is recognised.
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
        """Copy of the weights on the CPU, by key."""
        return {key: p.detach().cpu().clone() for key, p in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Copy of the gradients accumulated since the last step, by key; zeros if none are."""
        return {
            key: gradient.detach().cpu().clone()
            for key, gradient in zip(self.parameters, self._accumulated(), strict=True)
        }

    def accumulate(self, gradients: Sequence[Tensor | None]) -> None:
        """Add to the accumulated gradients; None counts as zeros.

        Raises:
            NonFiniteError: a gradient is not finite. Nothing has been added then.
        """
        added = [
            torch.zeros_like(p) if gradient is None else gradient.to(p.dtype)
            for p, gradient in zip(self.parameters.values(), gradients, strict=True)
        ]
        # One L2 norm over all of them is finite only if every entry is: one check on the device
        # instead of one for each matrix.
        norm = nn.utils.get_total_norm(added)
        if not bool(torch.isfinite(norm)):
            raise NonFiniteError(
                f"the gradient of the weights must be finite, got the norm {norm.item()}: "
                f"nothing was added; look for log-probs or ratios that overflow.",
                kind="nan" if bool(norm.isnan()) else "inf",
            )
        if self._gradients is None:
            self._gradients = added
        else:
            # Losses are sums over tokens, never means, so the gradient of several calls is the
            # plain sum of theirs. One multi-tensor kernel adds all matrices.
            torch._foreach_add_(self._gradients, added)

    def step(self, params: types.AdamParams) -> float:
        """Make one AdamW step with the accumulated gradients and clear them.

        If `grad_clip_norm` is above 0, the gradients are scaled by
        `min(1, grad_clip_norm / norm)`, where `norm` is the L2 norm over all weights. Without
        accumulated gradients it is a step with zeros: moments decay, and weights may still move.

        Returns:
            The norm before clipping.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = params.learning_rate
            group["betas"] = (params.beta1, params.beta2)
            group["eps"] = params.eps
            group["weight_decay"] = params.weight_decay
        gradients = self._accumulated()
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

    def load(
        self, weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor] | None
    ) -> None:
        """Copy weights and an optimizer's state into the adapter, and clear its gradients.

        Args:
            weights: as `weights` returns them.
            optimizer_state: as `optimizer_state` returns it; None starts a fresh optimizer.

        Raises:
            StateError: names or shapes differ from this adapter's. Nothing has changed then.
        """
        _check_same_shapes("weights", weights, self.parameters)
        if optimizer_state is not None:
            _check_same_shapes("optimizer", optimizer_state, self._optimizer_state_like())
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(weights[key])
        self._gradients = None
        self._optimizer = self._fresh_optimizer()
        for key, parameter in self.parameters.items() if optimizer_state else ():
            self._optimizer.state[parameter] = {
                name: optimizer_state[f"{name}/{key}"].to(like, copy=True)  # type: ignore[index]  # not None
                for name, like in self._state_like(parameter).items()
            }
        self.version += 1

    def optimizer_state(self) -> dict[str, Tensor]:
        """Copy of AdamW's state on the CPU, by `name/key`; empty before the first step."""
        return {
            f"{name}/{key}": value.detach().cpu().clone()
            for key, parameter in self.parameters.items()
            for name, value in self._optimizer.state.get(parameter, {}).items()
        }

    def _accumulated(self) -> list[Tensor]:
        if self._gradients is not None:
            return self._gradients
        return [torch.zeros_like(p) for p in self.parameters.values()]

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters.values(), weight_decay=0.0)

    def _optimizer_state_like(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": like
            for key, parameter in self.parameters.items()
            for name, like in self._state_like(parameter).items()
        }

    @staticmethod
    def _state_like(parameter: Tensor) -> dict[str, Tensor]:
        return {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}


def check_adam(params: object) -> types.AdamParams:
    """Check settings of AdamW, and return them.

    Raises:
        InputError: they are no `AdamParams`, or one of them breaks a rule.
    """
    if not isinstance(params, types.AdamParams):
        raise InputError(
            f"optim_params must be tinker.types.AdamParams, the one optimizer the engine has, "
            f"got {params!r}."
        )
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        value = getattr(params, name)
        least = _LEAST_EPS if name == "eps" else 0
        valid = math.isfinite(value) and value >= least
        if not valid or (name.startswith("beta") and value >= 1):
            rule = "in [0, 1)" if name.startswith("beta") else f">= {least} and finite"
            raise InputError(f"{name} must be {rule}, got {value!r}.")
    return params


def _check_same_shapes(
    what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    if found.keys() != expected.keys():
        differing = sorted(found.keys() ^ expected.keys())
        raise StateError(
            f"{what} must be those of a model and rank like this one, and {len(differing)} names "
            f"differ, {differing[0]!r} among them."
        )
    for key, tensor in expected.items():
        if found[key].shape != tensor.shape:
            raise StateError(
                f"{what}[{key!r}] must have the shape {list(tensor.shape)}, "
                f"got {list(found[key].shape)}."
            )
