"""Read the fields of a datum's `loss_fn_inputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import InputError


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


def token_mask(datum: Any, index: int, shape: torch.Size) -> Tensor | None:
    """Mask `[T]` of the tokens of a datum that count; None if all do.

    Args:
        datum: the datum.
        index: its place in the batch, for messages.
        shape: of its log-probs, `[T]` or `[T, K]`.

    Raises:
        InputError: the field that says which tokens count has another shape.
    """
    counted = counted_tokens(datum)
    if counted is None:
        return None
    field, mask = counted
    if mask.dim() > 1 and mask.shape == shape:
        mask = mask.any(-1)  # weights [T, K]: a token counts if one of its classes does
    if mask.shape != shape[:1]:
        raise InputError(
            f"{field} of datum {index} must have one number per token, [{shape[0]}], "
            f"got {list(mask.shape)}.",
            datum=index,
        )
    return mask


def were_sampled(data: Any) -> bool | None:
    """Return whether the tokens of a batch were sampled from a model, as their data say.

    Data with the log-probs at which their tokens were sampled, in the field `logprobs`, are those
    of a rollout; data without them are fixed: their tokens stand in a file, and say nothing about
    the distribution of the model that is trained on them.

    Returns:
        None if there are no data to ask.

    Raises:
        InputError: some data have the field and some do not.
    """
    if not isinstance(data, Sequence) or not data:
        return None
    sampled = [loss_fn_input(datum, "logprobs") is not None for datum in data]
    if len(set(sampled)) > 1:
        raise InputError(
            f"either all data of a batch must have sampling log-probs, in the field 'logprobs', or "
            f"none, got datum {sampled.index(True)} with and datum {sampled.index(False)} without: "
            f"use one batch for sampled and another for fixed data.",
            datum=sampled.index(False),
        )
    return sampled[0]
