"""Annealed Gaussian noise on gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from steelyard.errors import SpecError
from steelyard.gradients.sharded import is_sharded, part_like
from steelyard.integrations.optim.transform import (
    Schedule,
    Slot,
    Strength,
    Transform,
    Where,
    batches,
    by_kind,
    reduction_dtype,
    refuse_sparse,
    split_large,
)
from steelyard.spec.checks import is_finite, is_whole


@dataclass(frozen=True, kw_only=True)
class _Noise(Transform):
    variance: Strength
    decay: float
    seed: int

    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:  # noqa: ARG002
        refuse_sparse(slots, self.name, "choose others with where=, or sparse=False")
        std = math.sqrt(self.variance.at(step) / (1 + step) ** self.decay)
        if std == 0:
            return
        draw = _Draw(self.seed, step, std)
        if any(is_sharded(slot.parameter) for slot in slots):
            _add_shards(slots, draw)
            return
        for (gradients,) in batches([slot.gradient for slot in slots]):
            for gradient in gradients:
                gradient.add_(draw(gradient))


class _Draw:
    """Noise of one step.

    The generators are of this step alone: noise depends on (seed, step, device), never on history,
    and torch's global generator is not touched.
    """

    def __init__(self, seed: int, step: int, std: float) -> None:
        self._seed, self._step, self._std = seed, step, std
        self._generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, like: Tensor) -> Tensor:
        device = like.device
        if device not in self._generators:
            seed = _seed(self._seed, self._step, len(self._generators))
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        noise = torch.empty_like(like, dtype=reduction_dtype(like))
        return noise.normal_(0.0, self._std, generator=self._generators[device])


def _add_shards(slots: Sequence[Slot], draw: _Draw) -> None:
    """Add to each part its part of the noise of the whole parameter, as one process would draw it.

    Every process draws all of the noise, of one parameter at a time.
    """
    # Of the whole shape, without the memory.
    shapes = [slot.gradient.new_empty(1).expand(slot.parameter.shape) for slot in slots]
    for rows in by_kind(zip(shapes, slots, strict=True)):
        for shape, slot in rows:
            noise = torch.cat([draw(piece) for (piece,) in split_large(shape)])
            slot.gradient.add_(part_like(noise, slot.parameter))


def gradient_noise(
    variance: float | Schedule,
    decay: float = 0.55,
    seed: int = 0,
    *,
    where: Where | None = None,
) -> Transform:
    """Add Gaussian noise of variance σ²ₜ = variance/(1 + t)^decay, t the optimizer's steps so far.

    The noise depends on the seed and on t alone: a resumed run draws the same noise as one that
    was not interrupted, and replicas with the same seed stay equal.

    Args:
        variance: A number >= 0, or a schedule `step -> float`.
        decay: The exponent of the annealing; 0 keeps the variance.
        seed: A whole number >= 0.
        where: Selects the parameters; None: all.

    Raises:
        SpecError: An argument breaks its rule.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, gradient_noise
        >>> w = torch.nn.Parameter(torch.zeros(10_000))
        >>> w.grad = torch.zeros(10_000)
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [gradient_noise(0.25, seed=1)]):
        ...     optimizer.step()
        >>> round(w.grad.std().item(), 1)
        0.5

    References:
        Neelakantan et al. (2015), "Adding gradient noise improves learning for very deep
        networks".
    """
    if not is_finite(decay) or decay < 0:
        raise SpecError(f"decay must be a finite number >= 0, got {decay!r} (gradient_noise).")
    if not is_whole(seed, at_least=0):
        raise SpecError(f"seed must be a whole number >= 0, got {seed!r} (gradient_noise).")
    return _Noise(
        name="gradient_noise",
        where=where,
        variance=Strength("variance of gradient_noise", variance),
        decay=float(decay),
        seed=int(seed),
    )


def _seed(seed: int, step: int, device: int) -> int:
    """Hash three numbers to one seed, so that neighbouring steps draw independent noise."""
    return int(np.random.SeedSequence((seed, step, device)).generate_state(1, np.uint64)[0])
