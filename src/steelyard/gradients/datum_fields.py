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
