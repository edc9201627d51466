"""Clipping and centralizing gradients: by the global norm, or for each output unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from steelyard.errors import NonFiniteError, SpecError
from steelyard.gradients.sharded import is_sharded, sharded_dimensions
from steelyard.integrations.optim.transform import (
    Schedule,
    Slot,
    Strength,
    Transform,
    Where,
    add_up,
    batches,
    divides_units,
    reduction_dtype,
    split_large,
    unit_dimensions,
)
from steelyard.spec.checks import is_finite

_BLOCK = 1024  # elements in one block of `_blockwise_norm`
_norm: Callable[..., Tensor] = torch.linalg.vector_norm  # torch leaves it untyped


@dataclass(frozen=True, kw_only=True)
class _GlobalNorm(Transform):
    max_norm: Strength
    check_finite: bool

    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:  # noqa: ARG002
        max_norm = self.max_norm.at(step)
        gradients = [slot.gradient for slot in slots]
        sharded = any(is_sharded(slot.parameter) for slot in slots)
        norm = _norm_over_processes(slots) if sharded else _global_norm(gradients)
        scale: float | Tensor
        if self.check_finite:
            value = norm.item()
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"the norm of all gradients must be finite, got {value} at step {step} "
                    f"({self.name}); not finite: {_non_finite(slots)}. Skip such a step, or pass "
                    "check_finite=False to let it through.",
                    term=self.name,
                    kind="nan" if math.isnan(value) else "inf",
                )
            if value <= max_norm:
                return
            scale = max_norm / value
        else:
            # Without `item` nothing waits for the device. A norm of 0 gives inf, clamped to 1.
            scale = (max_norm / norm).clamp(max=1.0)
        for (batch,) in batches(gradients):
            factor = scale.to(batch[0].device) if isinstance(scale, Tensor) else scale
            for gradient in batch:
                gradient.mul_(factor)


@dataclass(frozen=True, kw_only=True)
class _Adaptive(Transform):
    ratio: Strength
    eps: float

    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:  # noqa: ARG002
        ratio = self.ratio.at(step)
        shared = [slot for slot in slots if divides_units(slot.parameter)]
        for slot in slots:
            if not divides_units(slot.parameter):
                self._clip(slot, ratio)
        if shared:
            self._clip_shared(shared, ratio)

    def _clip(self, slot: Slot, ratio: float) -> None:
        pair = (_stored_rows(slot), slot.gradient)
        # A vector is one unit, whose norm needs all of it; a matrix has one unit a row.
        for weights, gradient in split_large(*pair) if slot.parameter.ndim > 1 else [pair]:
            self._scale(gradient, _unit_norms(weights), _unit_norms(gradient), ratio)

    def _clip_shared(self, slots: Sequence[Slot], ratio: float) -> None:
        """Clip units of which this process has a part, with one reduction for all of them."""
        parameters = [slot.parameter for slot in slots]
        squares = [
            _unit_norms(part) ** 2 for slot in slots for part in (slot.weights, slot.gradient)
        ]
        twice = [p for p in parameters for _ in range(2)]
        norms = [s.sqrt() for s in add_up(squares, twice, [unit_dimensions(p) for p in twice])]
        for slot, own, of_gradient in zip(slots, norms[::2], norms[1::2], strict=True):
            self._scale(slot.gradient, own, of_gradient, ratio)

    def _scale(self, gradient: Tensor, own: Tensor, of_gradient: Tensor, ratio: float) -> None:
        max_norms = own.clamp_(min=self.eps).mul_(ratio)
        # A gradient of zero gives inf, clamped to 1.
        scale = max_norms.div_(of_gradient).clamp_(max=1.0)
        # Reading `scale` on an accelerator would cost more than multiplying by 1.
        if scale.device.type != "cpu" or not bool((scale == 1.0).all()):
            gradient.mul_(scale)


def clip_by_global_norm(
    max: float | Schedule,  # noqa: A002 - the name the design gives it
    *,
    check_finite: bool = True,
    where: Where | None = None,
) -> Transform:
    """Scale all gradients together so that their joint norm is at most `max`: g·min(max/‖g‖, 1).

    float16 and bfloat16 are summed in float32.

    Args:
        max: A number > 0, or a schedule `step -> float`.
        check_finite: Raise when the norm is NaN or infinite, before the optimizer's state is
            spoiled. This waits for the accelerator; in return gradients within the limit are
            not touched. False lets NaN through, as torch does.
        where: Selects the parameters, whose joint norm is clipped; None: all.

    Raises:
        SpecError: An argument breaks its rule.
        NonFiniteError: While stepping: the norm is not finite.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, clip_by_global_norm
        >>> w = torch.nn.Parameter(torch.zeros(2))
        >>> w.grad = torch.tensor([3.0, 4.0])
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [clip_by_global_norm(2.5)]):
        ...     optimizer.step()
        >>> w.grad.tolist()
        [1.5, 2.0]
    """
    if not isinstance(check_finite, bool):
        raise SpecError(
            f"check_finite must be True or False, got {check_finite!r} (clip_by_global_norm)."
        )
    return _GlobalNorm(
        name="clip_by_global_norm",
        where=where,
        max_norm=Strength("max of clip_by_global_norm", max, above_zero=True),
        check_finite=check_finite,
    )


def adaptive_clip(
    c: float | Schedule, eps: float = 1e-3, *, where: Where | None = None
) -> Transform:
    """Clip each output unit by the norm of its weights: g·min(c·max(‖w‖, eps)/‖g‖, 1).

    A unit is an element of the first axis, as torch's linear and convolution layers have it; a
    tensor of rank 0 or 1 is one unit.

    Args:
        c: A number > 0, or a schedule `step -> float`; 0.01 is usual.
        eps: Lower bound on ‖w‖, so that units at zero can move.
        where: Selects the parameters; None: all.

    Raises:
        SpecError: An argument breaks its rule.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import adaptive_clip, attach
        >>> w = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [0.6, 0.8]]))
        >>> w.grad = torch.tensor([[0.3, 0.4], [0.3, 0.4]])
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [adaptive_clip(0.25)]):
        ...     optimizer.step()
        >>> [[round(x, 3) for x in row] for row in w.grad.tolist()]
        [[0.3, 0.4], [0.15, 0.2]]

    References:
        Brock et al. (2021), "High-performance large-scale image recognition without
        normalization", section 4.
    """
    if not is_finite(eps) or eps <= 0:
        raise SpecError(f"eps must be a finite number > 0, got {eps!r} (adaptive_clip).")
    return _Adaptive(
        name="adaptive_clip",
        where=where,
        ratio=Strength("c of adaptive_clip", c, above_zero=True),
        eps=float(eps),
    )


def _global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """‖g‖ = sqrt(Σᵢ ‖gᵢ‖²): the norm of the norms of all tensors, a scalar tensor."""
    norms: list[Tensor] = []
    for (batch,) in batches(gradients):
        dtype = reduction_dtype(batch[0])
        if batch[0].device.type == "cpu":
            norms.extend(_blockwise_norm(gradient) for gradient in batch)
        elif batch[0].dtype == dtype:
            norms.append(get_total_norm(batch))  # one kernel for all of them
        else:
            norms.extend(_norm(gradient, dtype=dtype) for gradient in batch)
    return _norm(torch.stack([norm.to(norms[0]) for norm in norms]))


def _norm_over_processes(slots: Sequence[Slot]) -> Tensor:
    """‖g‖ of gradients of which some are sharded, with one reduction for those of one mesh."""
    squares = [_global_norm([slot.gradient]) ** 2 for slot in slots]
    sharded = [i for i, slot in enumerate(slots) if is_sharded(slot.parameter)]
    parameters = [slots[i].parameter for i in sharded]
    along = [sharded_dimensions(parameter) for parameter in parameters]
    for i, total in zip(
        sharded, add_up([squares[i] for i in sharded], parameters, along), strict=True
    ):
        squares[i] = total
    return torch.stack([square.to(squares[0]) for square in squares]).sum().sqrt()


def _blockwise_norm(gradient: Tensor) -> Tensor:
    """Norm of a tensor, as the norm of the norms of its blocks.

    torch 2.13's norm of a whole float32 tensor on the CPU adds one square after the other, so
    that small squares are rounded away beside a large sum: for 15 million elements it is 6e-4 too
    small. Sums over blocks stay short, and are faster.
    """
    flat, dtype = gradient.reshape(-1), reduction_dtype(gradient)
    in_blocks = flat.numel() // _BLOCK * _BLOCK
    blocks = _norm(flat[:in_blocks].view(-1, _BLOCK), dim=1, dtype=dtype)
    rest = _norm(flat[in_blocks:], dtype=dtype)
    return _norm(torch.cat([blocks, rest.view(1)]))


def _unit_norms(tensor: Tensor) -> Tensor:
    """Norm of each element of the first axis, `[U, 1, …]`, to be broadcast over the tensor."""
    axes = tuple(range(1, tensor.ndim)) if tensor.ndim > 1 else None
    return _norm(tensor, dim=axes, keepdim=True, dtype=reduction_dtype(tensor))


def _stored_rows(slot: Slot) -> Tensor:
    """Weights that belong to the gradient's values: for a sparse gradient, its stored rows."""
    rows = slot.rows
    if rows is None or slot.parameter.ndim == 1:
        return slot.weights
    return slot.weights[rows]


def _non_finite(slots: Sequence[Slot]) -> str:
    names = [slot.label for slot in slots if not bool(slot.gradient.isfinite().all())]
    elsewhere = any(is_sharded(slot.parameter) for slot in slots)
    otherwise = "parts of other processes" if elsewhere else "only their sum of squares"
    return "; ".join(names) or otherwise


@dataclass(frozen=True, kw_only=True)
class _Centralize(Transform):
    def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:  # noqa: ARG002
        matrices = [slot for slot in slots if slot.parameter.ndim > 1]
        shared = [slot for slot in matrices if divides_units(slot.parameter)]
        if shared:
            _centralize_shared(shared)
        whole = [slot.gradient for slot in matrices if not divides_units(slot.parameter)]
        for (gradients,) in batches(whole):
            for gradient in gradients:
                # g ← g − mean(g) over all axes but the first; `batches` cuts along the first
                # only, so a piece holds whole output units.
                axes = tuple(range(1, gradient.ndim))
                gradient.sub_(gradient.mean(axes, keepdim=True, dtype=reduction_dtype(gradient)))


def _centralize_shared(slots: Sequence[Slot]) -> None:
    """Centralize units of which this process has a part, with one reduction for all of them."""
    parameters = [slot.parameter for slot in slots]
    sums = [
        slot.gradient.sum(
            tuple(range(1, slot.gradient.ndim)), keepdim=True, dtype=reduction_dtype(slot.gradient)
        )
        for slot in slots
    ]
    totals = add_up(sums, parameters, [unit_dimensions(p) for p in parameters])
    for slot, total in zip(slots, totals, strict=True):
        slot.gradient.sub_(total / math.prod(slot.parameter.shape[1:]))


def centralize(*, where: Where | None = None) -> Transform:
    """Subtract from each output unit's gradient its mean, over all axes but the first.

    Tensors of rank 0 and 1 are left as they are.

    Args:
        where: Selects the parameters; None: all.

    Raises:
        SpecError: `where` is not a function.

    Example:
        >>> import torch
        >>> from steelyard.integrations.optim import attach, centralize
        >>> w = torch.nn.Parameter(torch.zeros(2, 2))
        >>> w.grad = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
        >>> optimizer = torch.optim.SGD([w], lr=1.0)
        >>> with attach(optimizer, [centralize()]):
        ...     optimizer.step()
        >>> w.grad.tolist()
        [[-1.0, 1.0], [0.0, 0.0]]

    References:
        Yong et al. (2020), "Gradient centralization: a new optimization technique for deep
        neural networks".
    """
    return _Centralize(name="centralize", where=where)
