"""Weight decay, through the gradient or decoupled from it.

With the penalty gradient p(w) = r·sign(w) + (1 − r)·w, r the L1 ratio:

    coupled      g ← g + d·p(w)       passes through the optimizer's moments and preconditioner
    decoupled    w ← w − lr·d·p(w)    once a step, before the optimizer's own update
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from steelyard.errors import SpecError
from steelyard.integrations.optim.transform import (
    Schedule,
    Slot,
    Strength,
    Transform,
    Where,
    batches,
    refuse_sparse,
)
from steelyard.spec.checks import is_finite


@dataclass(frozen=True, kw_only=True)
class _Decay(Transform):
    strength: Strength
    l1_ratio: float
    decoupled: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_finite(self.l1_ratio) or not 0 <= self.l1_ratio <= 1:
            raise SpecError(
                f"l1_ratio must be a number in [0, 1], got {self.l1_ratio!r} ({self.name})."
            )
        if not isinstance(self.decoupled, bool):
            raise SpecError(
                f"decoupled must be True or False, got {self.decoupled!r} ({self.name})."
            )

    def check(self, optimizer: Optimizer) -> None:
        super().check(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            if self.decoupled and "lr" not in group:
                options = ", ".join(repr(key) for key in group if key != "params") or "none"
                raise SpecError(
                    f"{self.name} with decoupled=True must have a learning rate 'lr' in every "
                    f"group, got the options {options} in group {number}: use decoupled=False."
                )

    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:
        decay = self.strength.at(step)
        if decay == 0:
            return
        if not self.decoupled:
            cure = "use decoupled=True, choose others with where=, or sparse=False in the embedding"
            refuse_sparse(slots, self.name, cure)
            parameters = [slot.weights for slot in slots]
            for pair in batches(parameters, [slot.gradient for slot in slots]):
                for weights, gradient in zip(*pair, strict=True):
                    gradient.add_(_penalty_gradient(weights, self.l1_ratio), alpha=decay)
        elif first:  # a closure may be evaluated several times in a step
            groups = {id(slot.group): slot.group for slot in slots}
            for key, group in groups.items():
                parameters = [slot.weights for slot in slots if id(slot.group) == key]
                for (batch,) in batches(parameters):
                    for weights in batch:
                        _shrink(weights, group["lr"], decay, self.l1_ratio)


def _penalty_gradient(weights: Tensor, l1_ratio: float) -> Tensor:
    """l1_ratio · sign(w) + (1 − l1_ratio) · w; for a ratio of 0 the weights themselves, no copy."""
    if l1_ratio == 0:
        return weights
    gradient = weights.sign()
    if l1_ratio < 1:
        gradient.mul_(l1_ratio).add_(weights, alpha=1 - l1_ratio)
    return gradient


def _shrink(weights: Tensor, lr: float | Tensor, decay: float, l1_ratio: float) -> None:
    """Apply w ← w − lr·decay·p(w) in place."""
    if l1_ratio == 0:
        # w·(1 − lr·decay), as AdamW computes it: w − lr·decay·w would round differently.
        weights.mul_(1 - lr * decay)
        return
    # A learning rate may be a tensor, which `alpha` does not take.
    weights.sub_(_penalty_gradient(weights, l1_ratio).mul_(lr * decay))


def l2_decay(
    d: float | Schedule, *, decoupled: bool = False, where: Where | None = None
) -> Transform:
    """Add L2 decay to the gradient, g + d·w; decoupled, shrink the weights, w − lr·d·w.

    The first is SGD's own `weight_decay`, the second AdamW's, bit for bit.

    Args:
        d: A number >= 0, or a schedule `step -> float` that counts the optimizer's steps.
        decoupled: Shrink the weights by lr·d·w, each group with its own `lr`, instead of
            touching the gradient.
        where: Selects the parameters; None: all. `lambda p: p.ndim > 1` leaves out biases and
            norms.

    Raises:
        SpecError: An argument breaks its rule.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, l2_decay
        >>> w = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> w.grad = torch.tensor([0.0, 1.0])
        >>> with attach(optimizer, [l2_decay(0.5)]):
        ...     optimizer.step()
        >>> w.grad.tolist(), w.tolist()
        ([1.0, 0.5], [1.0, -1.5])

    References:
        Loshchilov & Hutter (2019), "Decoupled weight decay regularization".
    """
    return _Decay(
        name="l2_decay",
        where=where,
        strength=Strength("d of l2_decay", d),
        l1_ratio=0.0,
        decoupled=decoupled,
    )


def l1_decay(
    d: float | Schedule, *, decoupled: bool = False, where: Where | None = None
) -> Transform:
    """Add L1 decay to the gradient, g + d·sign(w) with sign(0) = 0.

    Decoupled it is w − lr·d·sign(w), which may carry a small weight across zero.

    Args:
        d: As in `l2_decay`, like `decoupled` and `where`.
        decoupled: Shrink the weights instead.
        where: Selects the parameters; None: all.

    Raises:
        SpecError: An argument breaks its rule.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, l1_decay
        >>> w = torch.nn.Parameter(torch.tensor([2.0, 0.0, -1.0]))
        >>> w.grad = torch.zeros(3)
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [l1_decay(0.5)]):
        ...     optimizer.step()
        >>> w.grad.tolist()
        [0.5, 0.0, -0.5]
    """
    return _Decay(
        name="l1_decay",
        where=where,
        strength=Strength("d of l1_decay", d),
        l1_ratio=1.0,
        decoupled=decoupled,
    )


def elastic_net_decay(
    d: float | Schedule,
    l1_ratio: float = 0.5,
    *,
    decoupled: bool = False,
    where: Where | None = None,
) -> Transform:
    """Add elastic-net decay to the gradient, g + d·(r·sign(w) + (1 − r)·w).

    r = 1 is `l1_decay`, r = 0 is `l2_decay`.

    Args:
        d: As in `l2_decay`, like `decoupled` and `where`.
        l1_ratio: r, in [0, 1].
        decoupled: Shrink the weights by lr·d·(r·sign(w) + (1 − r)·w) instead.
        where: Selects the parameters; None: all.

    Raises:
        SpecError: An argument breaks its rule.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, elastic_net_decay
        >>> w = torch.nn.Parameter(torch.tensor([2.0, -4.0]))
        >>> w.grad = torch.zeros(2)
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [elastic_net_decay(1.0, l1_ratio=0.25)]):
        ...     optimizer.step()
        >>> w.grad.tolist()
        [1.75, -3.25]
    """
    return _Decay(
        name="elastic_net_decay",
        where=where,
        strength=Strength("d of elastic_net_decay", d),
        l1_ratio=l1_ratio,
        decoupled=decoupled,
    )
