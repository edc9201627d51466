"""The score-function estimate: a gradient for a term that only judges each datum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import GradientError, TermResultError
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input
from steelyard.gradients.layout import Layout


def read_costs(term: str, costs: object, layout: Layout) -> Tensor:
    """The penalties a term returned, one per datum, in float64.

    Raises:
        TermResultError: they are not numbers, or not as many as there are data.
        GradientError: the log-probs have classes, so there is no one log-prob per token.
    """
    if layout.shapes is not None:
        shape = next(shape for shape in layout.shapes if len(shape) != 1)
        raise GradientError(
            f"gradient='score' needs one log-prob per token, [T] for each datum, got the shape "
            f"{list(shape)} (regularizer {term!r}).",
            term=term,
        )
    try:
        tensor = torch.as_tensor(costs, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0, 0)
    count = len(layout.sizes)
    if tensor.dim() == 0 and count == 1:
        tensor = tensor.reshape(1)
    if tensor.shape != (count,):
        got = f"the shape {list(tensor.shape)}" if tensor.dim() != 2 else repr(costs)  # noqa: PLR2004
        raise TermResultError(
            f"with gradient='score' the term must return one penalty per datum, "
            f"{count} here, got {got} (regularizer {term!r}).",
            term=term,
        )
    return tensor


def score_gradient(term: str, costs: Tensor, data: Any, layout: Layout) -> Tensor:
    """(c_i - mean c) / (n - 1) for every unmasked token of datum i; c_i itself if n = 1.

    The leave-one-out baseline makes it unbiased for the gradient of the expected penalty,
    when the data were sampled from the model being trained. On fixed data it is a push that
    makes penalised data less likely. Reference: Kool, van Hoof and Welling, "Buy 4 REINFORCE
    Samples, Get a Baseline for Free!", 2019.

    Raises:
        GradientError: the weights of a datum do not fit its log-probs.
    """
    count = len(costs)
    pulls = costs if count == 1 else (costs - costs.mean()) / (count - 1)
    masks = _masks(term, data, layout)
    return torch.cat([pull * mask for pull, mask in zip(pulls, masks, strict=True)])


def _masks(term: str, data: Any, layout: Layout) -> list[Tensor]:
    data = data if isinstance(data, Sequence) else ()
    if data and len(data) != len(layout.sizes):
        raise GradientError(
            f"gradient='score' needs as many data as log-probs, got {len(data)} and "
            f"{len(layout.sizes)} (regularizer {term!r}).",
            term=term,
        )
    masks = []
    for index, size in enumerate(layout.sizes):
        weights = _weights(data[index]) if data else None
        mask = torch.ones(size, dtype=torch.float64) if weights is None else weights != 0
        if mask.shape != (size,):
            raise GradientError(
                f"weights of datum {index} must have the shape of its log-probs, [{size}], got "
                f"{list(mask.shape)} (regularizer {term!r}).",
                term=term,
            )
        masks.append(mask.double())
    return masks


def _weights(datum: Any) -> Tensor | None:
    weights = loss_fn_input(datum, "weights")
    return None if weights is None else as_tensor(weights, torch.float64).cpu()
