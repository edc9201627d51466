"""A LoRA adapter: its weights, their accumulated gradients, and their optimizer.

LoRA (Hu et al., 2021, arXiv:2106.09685) adds to each chosen layer `y = W x` a trained product of
two thin matrices, `y = W x + (alpha / rank) B A x`, with `A: [rank, in]` and `B: [out, rank]`. `B`
starts at zero, so that a fresh adapter does not change the model.

On a 16-bit model peft keeps LoRA matrices in float32 and casts every activation to float32 and
back. `HalfLora` leaves the matrices that are trained as they are, in float32, with their optimizer
and their accumulated gradients, and the forward pass reads 16-bit copies of them, made once a step:

    y = x W^T + scale · (x A^T) B^T,

where the second product is added to the first one in place. Gradients are those of the copies. The
output layer keeps peft's way: its B A is added to W for projections, where 16 bits would lose it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear
from peft.tuners.tuners_utils import BaseTunerLayer
from tinker import types
from torch import Tensor, nn
from torch.nn.functional import linear

from steelyard.errors import InputError, NonFiniteError, StateError
from steelyard.spec.checks import is_whole

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
        copies: of them, in 16 bits, which the forward pass reads; a matrix without one is read
            itself.

    Attributes:
        leaves: what the forward pass reads, in the order of `parameters`.
        version: number of changes of the weights, by which an old autograd graph is recognised.
    """

    def __init__(
        self,
        name: str,
        settings: LoraSettings,
        parameters: Mapping[str, nn.Parameter],
        copies: HalfCopies | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.parameters = dict(parameters)
        self._copies = copies
        copied = {} if copies is None else copies.by_key
        self.leaves: list[Tensor] = [
            copied.get(key, parameter) for key, parameter in self.parameters.items()
        ]
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
            # plain sum of theirs.
            for accumulated, gradient in zip(self._gradients, added, strict=True):
                accumulated.add_(gradient)

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
        self._update_copies()
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
        self._update_copies()
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

    def _update_copies(self) -> None:
        if self._copies is not None:
            self._copies.update(self.parameters)

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
    what: str, loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> None:
    if loaded.keys() != expected.keys():
        differing = sorted(loaded.keys() ^ expected.keys())
        raise StateError(
            f"{what} must be those of a model and rank like this one, and {len(differing)} names "
            f"differ, {differing[0]!r} among them."
        )
    for key, tensor in expected.items():
        if loaded[key].shape != tensor.shape:
            raise StateError(
                f"{what}[{key!r}] must have the shape {list(tensor.shape)}, "
                f"got {list(loaded[key].shape)}."
            )


class HalfCopies:
    """Copies of the matrices of one adapter, which are views of one tensor.

    Args:
        matrices: in float32, by the key that they have in a checkpoint.
        dtype: of the copies.

    Attributes:
        by_key: the copies.
    """

    def __init__(self, matrices: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._flat = _flat(list(matrices.values())).to(dtype, copy=True)
        split: Any = torch.split  # it has no types
        parts = split(self._flat, [matrix.numel() for matrix in matrices.values()])
        self.by_key: dict[str, Tensor] = {
            key: part.view(matrix.shape).requires_grad_()
            for (key, matrix), part in zip(matrices.items(), parts, strict=True)
        }

    def update(self, matrices: Mapping[str, Tensor]) -> None:
        """Copy the matrices again, after they have changed; one operation for all."""
        with torch.no_grad():
            self._flat.copy_(_flat([matrices[key] for key in self.by_key]))


def _flat(matrices: list[Tensor]) -> Tensor:
    return torch.cat([matrix.detach().flatten() for matrix in matrices])


class HalfLora:
    """The LoRA layers of one model, with the copies of each adapter.

    Args:
        dtype: of the copies.

    Attributes:
        active: name of the adapter in use; None: the base model.
        others: LoRA layers without copies, which keep peft's way.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.others: list[BaseTunerLayer] = []
        self._dtype = dtype
        self._layers: dict[str, _HalfLoraLayer] = {}
        self.active: str | None = None

    def add(self, net: Any, adapter: str, output_layer: Any) -> HalfCopies | None:
        """Make the copies of a new adapter; None if it trains the output layer alone.

        Args:
            net: the model, with the adapter.
            adapter: its name.
            output_layer: left as it is.
        """
        matrices: dict[str, Any] = {}
        own: dict[str, _HalfLoraLayer] = {}
        self.others = []
        for name, module in net.named_modules():
            if not isinstance(module, Linear) or module is output_layer:
                self.others += [module] if isinstance(module, BaseTunerLayer) else []
            else:
                layer = self._layers.setdefault(name, _HalfLoraLayer(self, module))
                layer.module.forward = layer  # shadows the method of its class
                if adapter in module.lora_A:  # else others train it, and this one does not
                    own[name] = layer
                    for side in ("lora_A", "lora_B"):
                        matrices[f"{name}.{side}.weight"] = getattr(module, side)[adapter].weight
        if not own:
            return None
        copies = HalfCopies(matrices, self._dtype)
        for name, layer in own.items():
            a, b = (copies.by_key[f"{name}.{side}.weight"] for side in ("lora_A", "lora_B"))
            layer.copies[adapter] = (a, b, layer.module.scaling[adapter])
        return copies

    def remove(self, adapter: str) -> None:
        """Free the copies of an adapter."""
        for layer in self._layers.values():
            layer.copies.pop(adapter, None)

    def tensors(self) -> Iterator[Tensor]:
        """All copies."""
        for layer in self._layers.values():
            for a, b, _ in layer.copies.values():
                yield from (a, b)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Make it the base model until the block ends."""
        active, self.active = self.active, None
        try:
            yield
        finally:
            self.active = active


class _HalfLoraLayer:
    """Forward method of one layer."""

    def __init__(self, owner: HalfLora, module: Any) -> None:
        self._owner, self.module = owner, module
        self.copies: dict[str, tuple[Tensor, Tensor, float]] = {}

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        matrices = self.copies.get(self._owner.active or "")
        rows = x.reshape(-1, x.shape[-1])
        output: Tensor = self.module.base_layer(rows, *args, **kwargs)
        if matrices is not None:
            a, b, scale = matrices
            output = output.addmm_(linear(rows, a), b.t(), alpha=scale)
        return output.view(*x.shape[:-1], -1)
