"""The SDK's data as tensors, checked against the model before any work is queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard.errors import InputError


@dataclass(frozen=True)
class DatumLimits:
    """Sizes of a model that data must fit.

    Attributes:
        vocabulary: number of tokens; ids run from 0 to one less.
        context: most tokens of one sequence.
    """

    vocabulary: int
    context: int


@dataclass(frozen=True)
class DatumTensors:
    """One datum as tensors.

    Attributes:
        tokens: input of the model, `[T]`.
        targets: tokens whose log-probs are computed at each position, `[T]` or `[T, K]`.
        inputs: the other fields that a loss reads, each in the shape of the targets.
    """

    tokens: Tensor
    targets: Tensor
    inputs: Mapping[str, Tensor]


def read_examples(
    data: Sequence[types.Datum], fields: Mapping[str, float | None], limits: DatumLimits
) -> list[DatumTensors]:
    """Convert the SDK's data to tensors.

    Args:
        data: the data.
        fields: names of the fields that the loss reads beside the targets, each with the default
            for a datum without it; None: the field is required.
        limits: of the model.

    Raises:
        InputError: a datum breaks a rule; the message names its index and the field.
    """
    if not isinstance(data, Sequence) or not data:
        raise InputError(f"data must be a list of at least one Datum, got {data!r}.")
    return [_read(index, datum, fields, limits) for index, datum in enumerate(data)]


def read_prompt(
    prompt: types.ModelInput, limits: DatumLimits, what: str = "prompt", datum: int | None = None
) -> Tensor:
    """Tokens of a model input, `[T]`; `what` and `datum` say which, for errors.

    Raises:
        InputError: it holds anything but text, is empty or too long, or a token is not in the
            vocabulary.
    """
    if not isinstance(prompt, types.ModelInput):
        raise InputError(f"{what} must be a tinker ModelInput, got {prompt!r}.", datum=datum)
    kinds = {chunk.type for chunk in prompt.chunks if not hasattr(chunk, "tokens")}
    if kinds:
        raise InputError(
            f"{what} must hold text tokens alone, got {', '.join(sorted(kinds))}.", datum=datum
        )
    tokens = prompt.to_ints()
    if not 0 < len(tokens) <= limits.context:
        raise InputError(
            f"{what} must hold 1 to {limits.context} tokens, the model's context, "
            f"got {len(tokens)}.",
            datum=datum,
        )
    for token in (min(tokens), max(tokens)):
        _check_vocabulary(what, token, limits, datum)
    return torch.tensor(tokens, dtype=torch.int64)


def _read(
    index: int, datum: types.Datum, fields: Mapping[str, float | None], limits: DatumLimits
) -> DatumTensors:
    if not isinstance(datum, types.Datum):
        raise InputError(
            f"data[{index}] must be a tinker Datum, got {type(datum).__name__}.", datum=index
        )
    tokens = read_prompt(datum.model_input, limits, f"data[{index}].model_input", index)
    targets = read_field(index, datum, "target_tokens")
    where = f"data[{index}].loss_fn_inputs['target_tokens']"
    if targets.is_floating_point():
        raise InputError(
            f"{where} must be whole numbers (int64), got {targets.dtype}.", datum=index
        )
    if targets.dim() not in (1, 2) or targets.shape[0] != len(tokens) or not targets.numel():
        raise InputError(
            f"{where} must have the shape [T] or [T, K] with T = {len(tokens)}, one for each "
            f"token of model_input, got {list(targets.shape)}.",
            datum=index,
        )
    # All data of a forward pass are padded to the widest of them.
    if targets.dim() > 1 and targets.shape[1] > limits.vocabulary:
        raise InputError(
            f"{where} must have at most {limits.vocabulary} columns, the model's vocabulary, got "
            f"{targets.shape[1]}.",
            datum=index,
        )
    for target in (targets.min(), targets.max()):
        _check_vocabulary(where, int(target), limits, index)
    inputs = {
        name: _input(index, datum, name, targets.shape, default) for name, default in fields.items()
    }
    return DatumTensors(tokens, targets, inputs)


def _input(
    index: int, datum: types.Datum, name: str, shape: torch.Size, default: float | None
) -> Tensor:
    if default is not None and name not in datum.loss_fn_inputs:
        return torch.full(shape, default)
    values = read_field(index, datum, name).to(torch.float32)
    where = f"data[{index}].loss_fn_inputs[{name!r}]"
    if values.shape != shape:
        raise InputError(
            f"{where} must have the shape of target_tokens, {list(shape)}, "
            f"got {list(values.shape)}.",
            datum=index,
        )
    not_finite = (~torch.isfinite(values)).nonzero()
    if len(not_finite):
        at = tuple(not_finite[0].tolist())
        raise InputError(
            f"{where} must be finite, got {values[at].item()} at {list(at)}.", datum=index
        )
    return values


def read_field(index: int, datum: types.Datum, name: str, reader: str | None = None) -> Tensor:
    """Field of `data[index]` as a tensor; `reader` names the loss that reads it, for errors.

    Raises:
        InputError: the datum has no such field, or a sparse one whose indices contradict its shape.
    """
    value: Any = datum.loss_fn_inputs.get(name)
    if value is None:
        which = "" if reader is None else f"which the loss {reader!r} reads, "
        raise InputError(
            f"data[{index}].loss_fn_inputs must hold {name!r}, {which}"
            f"got {sorted(datum.loss_fn_inputs)}.",
            datum=index,
        )
    try:
        tensor: Tensor = value.to_torch()
    except (AssertionError, RuntimeError) as error:
        raise InputError(
            f"data[{index}].loss_fn_inputs[{name!r}] must be a whole tensor, and it is not: "
            f"{error}",
            datum=index,
        ) from error
    return tensor


def _check_vocabulary(what: str, token: int, limits: DatumLimits, datum: int | None) -> None:
    if not 0 <= token < limits.vocabulary:
        raise InputError(
            f"{what} must hold tokens from 0 to {limits.vocabulary - 1}, the model's "
            f"vocabulary, got {token}.",
            datum=datum,
        )
