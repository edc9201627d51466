"""`compute` and `acompute`: one call, without a pipeline to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steelyard.composition.pipeline import Pipeline
from steelyard.gradients import LogProbs
from steelyard.output import CustomLossOutput
from steelyard.spec import Regularizer, RegularizerSpec, TermFn


def compute(
    data: Any,
    logprobs: LogProbs,
    loss_fn: TermFn | Regularizer,
    *,
    regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
    track_grad_norms: bool = False,
    parallel: bool = True,
    timeout: float = 30.0,
    max_concurrency: int | None = None,
    check_finite: bool = True,
    step: int = 0,
) -> CustomLossOutput:
    """The composed loss of one batch; see `Pipeline`, which learns from call to call.

    Example:
        >>> import torch, steelyard
        >>> logprobs = [torch.tensor([-1.0, -3.0])]
        >>> steelyard.compute([], logprobs, lambda data, lps: -lps[0].sum()).loss_total
        4.0
    """
    pipeline = Pipeline(
        loss_fn,
        regularizers,
        track_grad_norms,
        parallel,
        timeout,
        max_concurrency,
        check_finite,
    )
    return pipeline.compute(data, logprobs, step)


async def acompute(
    data: Any,
    logprobs: LogProbs,
    loss_fn: TermFn | Regularizer,
    *,
    regularizers: Iterable[RegularizerSpec | Mapping[str, Any]] = (),
    track_grad_norms: bool = False,
    parallel: bool = True,
    timeout: float = 30.0,  # noqa: ASYNC109 - it is each term's, not this coroutine's
    max_concurrency: int | None = None,
    check_finite: bool = True,
    step: int = 0,
) -> CustomLossOutput:
    """As `compute`, without blocking the running event loop."""
    pipeline = Pipeline(
        loss_fn,
        regularizers,
        track_grad_norms,
        parallel,
        timeout,
        max_concurrency,
        check_finite,
    )
    return await pipeline.acompute(data, logprobs, step)
