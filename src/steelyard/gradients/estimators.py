"""Gradients of terms that autograd cannot differentiate: central differences, score function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import GradientError, TermResultError
from steelyard.gradients.datum_fields import counted_tokens
from steelyard.gradients.layout import Layout

MAX_EVALUATIONS = 10_000
RELATIVE_STEP = 1e-5


def check_count(term: str, size: int) -> None:
    """Check that a gradient of `size` entries takes at most 10,000 evaluations.

    Raises:
        GradientError: it takes more.
    """
    if 2 * size > MAX_EVALUATIONS:
        raise GradientError(
            f"gradient='numerical' may take at most {MAX_EVALUATIONS} evaluations, got "
            f"{2 * size} for {size} log-probs (regularizer {term!r}): use smaller batches, "
            f"gradient='score' with one penalty per datum, or write the term in torch.",
            term=term,
        )


async def differences(
    f: Callable[[Tensor], Awaitable[float]], flat: Tensor, start: int, stop: int, at_once: int = 1
) -> Tensor:
    """Central differences of `f` with respect to `flat[start:stop]`, `[stop - start]`, in float64.

    Args:
        f: the function; each evaluation is awaited.
        flat: the point x.
        start: the first index.
        stop: one past the last.
        at_once: how many evaluations may run concurrently.
    """

    async def slope(index: int, places: asyncio.Semaphore | None = None) -> float:
        above, below, distance = _neighbours(flat, index)
        if places is None:
            return (await f(above) - await f(below)) / distance

        async def limited(point: Tensor) -> float:
            async with places:
                return await f(point)

        high, low = await asyncio.gather(limited(above), limited(below))
        return (high - low) / distance

    indices = range(start, stop)
    if at_once == 1:
        slopes = [await slope(index) for index in indices]
    else:
        places = asyncio.Semaphore(at_once)
        slopes = await asyncio.gather(*(slope(index, places) for index in indices))
    return torch.tensor(slopes, dtype=torch.float64)


def _neighbours(flat: Tensor, index: int) -> tuple[Tensor, Tensor, float]:
    """The points x ± h·eᵢ, and their distance after rounding, which is the exact 2h."""
    above, below = flat.double().clone(), flat.double().clone()
    step = RELATIVE_STEP * max(1.0, abs(float(flat[index])))
    above[index] += step
    below[index] -= step
    return above, below, (above[index] - below[index]).item()


def read_costs(term: str, costs: object, layout: Layout) -> Tensor:
    """Convert the penalties that a term returned, one per datum, to `[n]` in float64.

    Raises:
        TermResultError: they are not numbers, or their count is not that of the data.
        GradientError: the log-probs are not `[T]`, one per token.
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
    """Estimate the gradient of the expected penalty with respect to the flat log-probs.

    It is (c_i - mean c) / (n - 1) for every unmasked token of datum i, and c_i if n = 1.
    With the leave-one-out baseline b_i = mean of the other costs, (c_i - b_i) / n is the same
    number. It is unbiased for the gradient of the expected penalty if the data were sampled
    from the model being trained; on fixed data it makes penalised data less likely. Reference:
    Kool, van Hoof and Welling, "Buy 4 REINFORCE Samples, Get a Baseline for Free!", 2019.

    Args:
        term: name of the term, for messages.
        costs: one penalty per datum, `[n]`.
        data: their fields say which tokens count; see `counted_tokens`.
        layout: that of the flat log-probs.

    Raises:
        GradientError: that field of a datum does not fit its log-probs.
    """
    count = len(costs)
    per_token = costs if count == 1 else (costs - costs.mean()) / (count - 1)
    masks = _masks(term, data, layout)
    return torch.cat([cost * mask for cost, mask in zip(per_token, masks, strict=True)])


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
        field, mask = (counted_tokens(data[index]) if data else None) or ("", torch.ones(size))
        if mask.shape != (size,):
            raise GradientError(
                f"{field} of datum {index} must have the shape of its log-probs, [{size}], got "
                f"{list(mask.shape)} (regularizer {term!r}).",
                term=term,
                datum=index,
            )
        masks.append(mask.double().cpu())
    return masks
