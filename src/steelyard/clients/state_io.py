"""What terms remember, as JSON: tensors and arrays go in by value."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steelyard.errors import CheckpointError, StateError

_TENSOR, _ARRAY = "__tensor__", "__array__"


def encode(term: str, state: Any) -> Any:
    """A state as what JSON can hold.

    Raises:
        StateError: something in it cannot be held.
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, torch.Tensor):
        dtype = str(state.dtype).removeprefix("torch.")
        return {_TENSOR: {"dtype": dtype, "shape": list(state.shape), "data": _flat(state)}}
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, np.ndarray):
        shape = list(state.shape)
        return {_ARRAY: {"dtype": str(state.dtype), "shape": shape, "data": state.ravel().tolist()}}
    if isinstance(state, list | tuple):
        return [encode(term, item) for item in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        return {key: encode(term, value) for key, value in state.items()}
    raise StateError(
        f"the state of {term!r} must be made of numbers, strings, tensors, arrays, lists and "
        f"mappings with string keys, got {state!r}."
    )


def decode(state: Any) -> Any:
    """The inverse of `encode`, but for tuples, which come back as lists."""
    if isinstance(state, list):
        return [decode(item) for item in state]
    if not isinstance(state, dict):
        return state
    if set(state) == {_TENSOR}:
        held = state[_TENSOR]
        dtype = getattr(torch, held["dtype"])
        return torch.tensor(held["data"], dtype=dtype).reshape(held["shape"])
    if set(state) == {_ARRAY}:
        held = state[_ARRAY]
        return np.array(held["data"], dtype=held["dtype"]).reshape(held["shape"])
    return {key: decode(value) for key, value in state.items()}


def write(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write an encoded state to a file, whole or not at all.

    Raises:
        CheckpointError: the disk refuses.
    """
    target = Path(path).expanduser()
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise CheckpointError(f"the state must be written to {target}, and: {error}.") from error


def read(path: str | Path) -> dict[str, Any]:
    """What `write` wrote.

    Raises:
        CheckpointError: it is not there, or is something else.
    """
    try:
        state: dict[str, Any] = json.loads(Path(path).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"path must be that of a saved state, and {path}: {error}."
        ) from error
    return state


def _flat(tensor: torch.Tensor) -> list[Any]:
    flat: list[Any] = tensor.detach().cpu().reshape(-1).tolist()
    return flat
