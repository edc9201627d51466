"""Inputs and an independent reference: torch's own autograd over log-probabilities in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from steelyard import penalties, schedules
from tests.penalties.backends import Backend

# Every kind of term, with a weight of its own.
TERMS: dict[str, dict[str, Any]] = {
    "entropy": {"weight": 0.5, "mode": "bonus"},
    "forward": {"weight": 0.7},
    "reverse": {"weight": -0.3, "direction": "reverse"},
    "symmetric": {"weight": 0.9, "direction": "symmetric"},
    "js": {"weight": 2.0},
    "z_loss": {"weight": 0.1},
    "cross_entropy": {"weight": 1.0},
}
KINDS = {"forward": "kl", "reverse": "kl", "symmetric": "kl"}


def written(names: Any, **options: Any) -> list[Any]:
    """Terms as a caller passes them."""
    return [(KINDS.get(n, n), {"name": n, **TERMS[n], **options}) for n in names]


def inputs(
    seed: int, rows: int, classes: int, dtype: torch.dtype = torch.float64, hard: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, reference and targets; hard: classes at -inf, and log ratios above the limit."""
    made = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=made, dtype=torch.float64)
    reference = logits + torch.randn(rows, classes, generator=made, dtype=torch.float64)
    targets = torch.randint(0, classes, (rows,), generator=made)
    if hard:
        logits[0, 1] = reference[0, 1] = -torch.inf
        logits[1, 2] = reference[2, 3] = -torch.inf
        reference[3] += 500  # an offset changes nothing
        reference[4, 0], logits[4, 5] = -300, 250  # the log ratio exceeds its limit
        logits[5, : classes // 2] = -torch.inf
        targets[:] = classes - 1
    return logits.to(dtype), reference.to(dtype), targets


def expected(
    name: str,
    logits: Tensor,
    reference: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    **options: Any,
) -> Tensor:
    """One value per row, by the penalties of log-probabilities, which have their own tests."""
    p = (logits / temperature).log_softmax(-1)
    q = (reference / temperature).log_softmax(-1)
    own = {key: value for key, value in {**TERMS[name], **options}.items() if key != "weight"}
    if name == "entropy":
        return torch.as_tensor(penalties.entropy(p, reduction="none", **own))
    if name == "js":
        return torch.as_tensor(penalties.js_divergence(p, q, reduction="none"))
    if name == "z_loss":
        return (logits / temperature).logsumexp(-1) ** 2
    if name == "cross_entropy":
        return torch.nn.functional.nll_loss(p, targets, reduction="none")
    return torch.as_tensor(penalties.kl_divergence(p, q, reduction="none", **own))


def by_autograd(
    names: Any, logits: Tensor, reference: Tensor, targets: Tensor, scale: Tensor, **options: Any
) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Each term's value, and its gradients by logits and reference, in float64."""
    z, r = (x.detach().double().requires_grad_() for x in (logits, reference))
    values, gradients = {}, {}
    for name in names:
        rows = expected(name, z, r, targets, **options)
        values[name] = torch.where(scale != 0, rows * scale, 0.0).sum()
        found = torch.autograd.grad(values[name], (z, r), allow_unused=True)
        gradients[name] = [torch.zeros_like(z) if g is None else g.nan_to_num(0.0) for g in found]
    return {name: value.detach() for name, value in values.items()}, gradients


PLANS: list[Any] = [
    [("entropy", schedules.warmup(1.0, 4)), ("z_loss", {"weight": schedules.linear(1.0, -1.0, 4)})],
    {"entropy": {"weight": schedules.warmup(1.0, 4)}, "z_loss": schedules.linear(1.0, -1.0, 4)},
]


def arguments(backend: Backend, *tensors: torch.Tensor) -> tuple[Any, Any, Any]:
    logits, reference, targets = tensors
    return (
        backend.array(logits.numpy()),
        backend.array(reference.numpy()),
        backend.array(targets.numpy(), "int64"),
    )
