"""Read the fields of a datum's `loss_fn_inputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def loss_fn_input(datum: Any, name: str) -> Any:
    """`loss_fn_inputs[name]` of a datum, which may be an object or a mapping; None if absent."""
    inputs = (
        datum.get("loss_fn_inputs")
        if isinstance(datum, Mapping)
        else getattr(datum, "loss_fn_inputs", None)
    )
    return inputs.get(name) if isinstance(inputs, Mapping) else None


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a field to a tensor: tinker's `TensorData`, arrays, lists and numbers."""
    value = value.to_torch() if hasattr(value, "to_torch") else value
    return torch.as_tensor(value, dtype=dtype)


def counted_tokens(datum: Any) -> tuple[str, Tensor] | None:
    """Field that says which tokens of a datum count, and True where it is not 0.

    The field is `weights`; without it `mask`; without both `logprobs`, the log-probs at which the
    tokens were sampled. Losses of reinforcement learning take no weights, and tinker-cookbook
    removes the mask before it sends the data: what is left is that the tokens of a prompt, which
    nobody sampled, have a log-prob of exactly 0 there.

    Returns:
        The field's name and the mask, in the field's shape; None if all tokens count.
    """
    for name in ("weights", "mask", "logprobs"):
        values = loss_fn_input(datum, name)
        if values is not None:
            return name, as_tensor(values) != 0
    return None
