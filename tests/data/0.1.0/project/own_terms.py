"""A term of the user's own that fails on some batches."""

from __future__ import annotations

from typing import Any

import torch


def flaky(data: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
    """The mean square; it fails where the batch holds a number that 5 divides."""
    if any(datum.record["number"] % 5 == 0 for datum in data):
        raise RuntimeError("the score is not available")
    return torch.cat(logprobs).square().mean()
