"""Central differences: the gradient of a term that autograd cannot differentiate.

∂f/∂xᵢ ≈ (f(x + hᵢeᵢ) − f(x − hᵢeᵢ)) / 2hᵢ, with hᵢ = 1e-5 · max(1, |xᵢ|), all in float64: the
truncation error is O(h²) ≈ 1e-10, and rounding adds about 1e-16 / h = 1e-11 relative to f.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch
from torch import Tensor

from steelyard.errors import GradientError

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
