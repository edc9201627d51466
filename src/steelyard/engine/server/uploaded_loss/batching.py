"""Data of equal shape in one run of an uploaded loss: the graph of one datum under `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import InputError

# (inputs of one datum) -> (loss, metrics)
Evaluate = Callable[[Sequence[Tensor]], tuple[Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class BatchResult:
    """Results of some data.

    Attributes:
        value: sum of their losses.
        gradients: of the sum, one for each datum; None if it does not depend on the log-probs.
        metrics: sums over the data.
    """

    value: Tensor
    gradients: Sequence[Tensor] | None
    metrics: dict[str, float]


def group_by_shape(
    inputs: Sequence[Sequence[Tensor]], largest: Callable[[int], int]
) -> list[list[int]]:
    """Indices of the data, in groups of equal shapes and types.

    Args:
        inputs: of each datum.
        largest: gives the largest size of the group of a datum, by its index.
    """
    groups: dict[Any, list[list[int]]] = {}
    for index, tensors in enumerate(inputs):
        own = groups.setdefault(tuple((each.shape, each.dtype) for each in tensors), [[]])
        if len(own[-1]) >= largest(index):
            own.append([])
        own[-1].append(index)
    return [group for each in groups.values() for group in each]


def run_together(evaluate: Evaluate, inputs: Sequence[Sequence[Tensor]]) -> BatchResult:
    """Run a loss for data of equal shapes.

    Args:
        evaluate: the loss of one datum.
        inputs: of each datum, the log-probs first.

    Raises:
        Exception: an operation cannot be batched, for example since the shape of its result
            depends on values; or it fails.
    """

    def of_one(*tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = evaluate(tensors)
        return value, {key: _to_scalar(key, metric) for key, metric in metrics.items()}

    logprobs, *others = [torch.stack(list(column)) for column in zip(*inputs, strict=True)]
    leaf = logprobs.detach().requires_grad_()
    values, metrics = torch.func.vmap(of_one)(leaf, *others)
    total = values.sum()
    gradients = None
    if total.requires_grad:
        (found,) = torch.autograd.grad(total, leaf, allow_unused=True)
        gradients = None if found is None else list(found.unbind())
    return BatchResult(total.detach(), gradients, _sums(metrics))


def run_alone(evaluate: Evaluate, inputs: Sequence[Tensor]) -> BatchResult:
    """Run a loss for one datum.

    Raises:
        InputError: an operation fails, or a metric is not a number.
    """
    leaf = inputs[0].detach().requires_grad_()
    value, metrics = evaluate([leaf, *inputs[1:]])
    gradients = None
    if value.requires_grad:
        (found,) = torch.autograd.grad(value, leaf, allow_unused=True)
        gradients = None if found is None else [found]
    numbers = {key: _to_float(key, metric) for key, metric in metrics.items()}
    return BatchResult(value.detach(), gradients, numbers)


def _to_scalar(key: str, metric: Any) -> Tensor:
    if isinstance(metric, Tensor) and metric.numel() == 1:
        return metric
    return torch.tensor(_to_float(key, metric), dtype=torch.float64)


def _sums(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Sums of metrics over data, read together: one by one they take longer than the loss."""
    if not metrics:
        return {}
    columns = [metric.detach().double().flatten() for metric in metrics.values()]
    return dict(zip(metrics, torch.stack(columns).sum(-1).tolist(), strict=True))


def _to_float(key: str, metric: Any) -> float:
    if isinstance(metric, Tensor) and metric.numel() == 1:
        return float(metric.detach())
    if isinstance(metric, int | float):
        return float(metric)
    raise InputError(f"the metric {key!r} must be one number, got {type(metric).__name__}.")
