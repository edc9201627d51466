"""Comparison of results of two clients, and a loss and a prompt for both."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from tinker import types

PROMPT = types.ModelInput.from_ints([1, 2, 3, 4])


def to_plain(value: Any) -> Any:  # noqa: PLR0911 - one for each kind
    """Convert a result to plain Python values, without fields that differ between runs."""
    if isinstance(value, types.ForwardBackwardOutput):
        return [value.loss_fn_output_type, to_plain(value.loss_fn_outputs), to_plain(value.metrics)]
    if isinstance(value, types.TensorData):
        return [value.dtype, list(value.to_numpy().shape), value.to_numpy()]
    if isinstance(value, types.SampledSequence):
        logprobs = np.array(value.logprobs)
        return [value.stop_reason, value.tokens, logprobs, to_plain(value.topk_logprobs)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not field.name.startswith("_")
        }
    if isinstance(value, types.OptimStepResponse):
        return to_plain(value.metrics)
    if isinstance(value, dict):
        return {key: to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return value


def assert_alike(actual: Any, expected: Any) -> None:
    """Fail unless two results are equal, numbers to 1e-5."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, each in expected.items():
            assert_alike(actual[key], each)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_alike(ours, theirs)
    elif isinstance(expected, float | np.ndarray):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    else:
        assert actual == expected


def traced_loss(
    logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = torch.exp(logprobs - logprobs.detach())
    loss = -(torch.clamp(ratio, 0.8, 1.2) * weights).sum() + logprobs.square().mean()
    return loss, {"custom/entropy:mean": -logprobs.mean(), "custom/tokens:sum": weights.sum()}
