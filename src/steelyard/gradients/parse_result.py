"""Parse the return value of a term: a loss, alone or with metrics."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import numbers
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steelyard.errors import NonFiniteError, TermResultError
from steelyard.gradients.sharded import whole
from steelyard.spec.error_messages import BASE, title


def split_metrics(term: str, returned: object) -> tuple[object, dict[str, float]]:
    """Split `loss` or `(loss, metrics)` into the loss and the metrics as floats.

    A plain function that returns an awaitable is awaited here: only `async def` is known to be
    async beforehand, and `lambda data, logprobs: judge(data, logprobs)` is not.

    Raises:
        TermResultError: it is neither.
    """
    if isinstance(returned, Tensor):
        return returned, {}
    if inspect.isawaitable(returned):
        returned = awaited(returned)
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2:  # noqa: PLR2004 - (loss, metrics)
        raise TermResultError(
            f"{title(term)} must return a loss or (loss, metrics), "
            f"got a tuple of {len(returned)} items.",
            term=term,
        )
    loss, metrics = returned
    if metrics is None:
        return loss, {}
    if not isinstance(metrics, Mapping):
        raise TermResultError(
            f"the metrics of {title(term)} must be a mapping of names to numbers, got {metrics!r}.",
            term=term,
        )
    return loss, {_key(term, key): _metric(term, key, value) for key, value in metrics.items()}


def is_unmeasured(term: str, loss: object) -> bool:
    """Return whether a term returned None: this batch has nothing that it measures.

    The base loss always returns a loss.
    """
    return loss is None and term != BASE


def as_scalar(term: str, loss: object) -> Tensor:
    """Convert a loss to a scalar tensor.

    Raises:
        TermResultError: it is no tensor, array or number, or has more than one element.
    """
    if not isinstance(loss, Tensor):
        loss = _tensor(term, loss)
    if loss.numel() != 1:
        raise TermResultError(
            f"{title(term)} must return a scalar, got the shape {list(loss.shape)}: reduce it "
            f"with .sum() or .mean() (gradient='score' takes one value per datum).",
            term=term,
        )
    if loss.is_complex():
        raise TermResultError(
            f"{title(term)} must return a real loss, got {loss.dtype}.", term=term
        )
    if type(loss) is not Tensor:  # of a sharded tensor each process has a part of the sum
        loss = whole(loss)
    return loss.reshape(()) if loss.dim() else loss


def _tensor(term: str, loss: object) -> Tensor:
    if isinstance(loss, numbers.Real) and not isinstance(loss, bool):
        return torch.tensor(float(loss), dtype=torch.float64)
    if not isinstance(loss, np.ndarray):
        raise TermResultError(
            f"{title(term)} must return a scalar tensor or a number, got {type(loss).__name__}.",
            term=term,
        )
    return torch.as_tensor(loss)


def check_finite(term: str, value: float, what: str = "value") -> None:
    """Check that `value` is finite.

    Raises:
        NonFiniteError: it is not.
    """
    if not math.isfinite(value):
        # A config has no key check_finite, and the base loss cannot be skipped.
        cure = (
            "mend the loss or the data, or lower the learning rate if it was finite before"
            if term == BASE
            else "mend the term; on_error='skip' leaves it out of such steps"
        )
        raise NonFiniteError(
            f"the {what} of {title(term)} must be finite, got {value}: {cure}.",
            term=term,
            kind="nan" if math.isnan(value) else "inf",
        )


def awaited(awaitable: Awaitable[object]) -> object:
    """Result of an awaitable, on an event loop of its own."""

    async def result() -> object:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result())
    # The caller's loop, if one runs in this thread, waits for us: it cannot run the awaitable.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, result()).result()


def _key(term: str, key: object) -> str:
    if not isinstance(key, str):
        raise TermResultError(
            f"the metrics of {title(term)} must have string names, got {key!r}.", term=term
        )
    return key


def _metric(term: str, key: str, value: Any) -> float:
    try:
        # torch warns about float() of a tensor that requires a gradient.
        return float(whole(value).item() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise TermResultError(
            f"the metric {key!r} of {title(term)} must be a number, got {value!r}.", term=term
        ) from None
