"""Write the state of terms as JSON, with tensors and arrays by value, and read it back."""

from __future__ import annotations

import contextlib
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
_KINDS = "biufU"  # of NumPy's dtypes: booleans, whole and floating-point numbers, strings


def encode(term: str, state: Any) -> Any:
    """Convert the state of a term to what JSON can hold.

    Raises:
        StateError: it holds something that cannot be converted.
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, torch.Tensor) and _is_plain(state):
        dtype = str(state.dtype).removeprefix("torch.")
        return {_TENSOR: {"dtype": dtype, "shape": list(state.shape), "data": _flat(state)}}
    if isinstance(state, np.generic):
        return encode(term, state.item())
    if isinstance(state, np.ndarray) and state.dtype.kind in _KINDS:
        shape = list(state.shape)
        return {_ARRAY: {"dtype": str(state.dtype), "shape": shape, "data": state.ravel().tolist()}}
    if isinstance(state, list | tuple):
        return [encode(term, item) for item in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        return {key: encode(term, value) for key, value in state.items()}
    raise StateError(
        f"the state of {term!r} must be made of real numbers, strings, dense tensors and arrays "
        f"of them, lists, and mappings with string keys, got {state!r}."
    )


def decode(term: str, state: Any) -> Any:
    """Invert `encode`, except that tuples come back as lists.

    Raises:
        StateError: a tensor or an array in it is damaged.
    """
    if isinstance(state, list):
        return [decode(term, item) for item in state]
    if not isinstance(state, dict):
        return state
    if set(state) not in ({_TENSOR}, {_ARRAY}):
        return {key: decode(term, value) for key, value in state.items()}
    ((kind, value),) = state.items()
    try:
        if kind == _TENSOR:
            dtype = getattr(torch, value["dtype"])
            return torch.tensor(value["data"], dtype=dtype).reshape(value["shape"])
        return np.array(value["data"], dtype=value["dtype"]).reshape(value["shape"])
    # Whatever torch and NumPy make of a wrong dtype, shape or value.
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(
            f"the state of {term!r} must hold tensors as they were saved, and one is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error


def write(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write an encoded state to a file, atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    temporary = None
    try:
        target = Path(path).expanduser()
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())  # the contents are on disk before the name is
        temporary.replace(target)
    # A path with a NUL or without a name is a ValueError, "~nobody" a RuntimeError.
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the state must be written to {path}, and: {error}.") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()  # gone, if it has replaced the target


def read(path: str | Path) -> dict[str, Any]:
    """Read a file that `write` wrote.

    Raises:
        CheckpointError: the file cannot be read, or is no JSON object.
    """
    try:
        state = json.loads(Path(path).expanduser().read_text("utf-8"))
    # Nested too deeply is a RecursionError, a RuntimeError; so is "~nobody".
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"path must be that of a saved state, and {path}: {error}."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"path must be that of a saved state, a JSON object, and {path} holds a "
            f"{type(state).__name__}."
        )
    return state


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_complex()


def _flat(tensor: torch.Tensor) -> list[Any]:
    flat: list[Any] = tensor.detach().cpu().reshape(-1).tolist()
    return flat
