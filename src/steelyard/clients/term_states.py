"""Terms of a client from call to call: built from registry names once, their states saved as JSON.

Tensors and arrays of a state are written by value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from steelyard.errors import CheckpointError, StateError
from steelyard.output.run_files import write_atomic
from steelyard.spec.protocol import Stateful
from steelyard.spec.regularizer import RegularizerSpec

TermLike: TypeAlias = RegularizerSpec | Mapping[str, Any]


class BuiltTerms:
    """Terms built from registry names, by the names of the terms."""

    def __init__(self) -> None:
        # {term: (registry name, options, function)}
        self._known: dict[str, tuple[str, Any, Any]] = {}

    def spec_of(self, regularizer: TermLike) -> RegularizerSpec:
        """Spec of a regularizer.

        A mapping that gives its `fn` as a registry name, with the same options as in an earlier
        call, gets the object built then, so that a stateful term keeps its state from call to call.

        Raises:
            SpecError: it breaks a rule.
            RegistryError: the name is unknown.
        """
        spec = RegularizerSpec.of(regularizer)
        if isinstance(regularizer, RegularizerSpec) or not isinstance(regularizer["fn"], str):
            return spec
        fn, options = regularizer["fn"], regularizer.get("options")
        known = self._known.get(spec.name)
        if known is not None and known[0] == fn and _equal(known[1], options):
            return replace(spec, fn=known[2])
        # A copy: the caller may change the mapping before the next call.
        self._known[spec.name] = (fn, _copied(options), spec.fn)
        return spec


def _copied(options: Any) -> Any:
    """Mappings and lists of options, copied; anything else is the object itself."""
    if isinstance(options, Mapping):
        return {key: _copied(value) for key, value in options.items()}
    if isinstance(options, list):
        return [_copied(value) for value in options]
    return options


def _equal(ours: Any, theirs: Any) -> bool:
    """Compare options; tensors and arrays, whose `==` is no truth value, by their elements."""
    if ours is theirs:
        return True
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return ours.keys() == theirs.keys() and all(_equal(ours[key], theirs[key]) for key in ours)
    if _is_list(ours) and _is_list(theirs):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    for kind in (torch.Tensor, np.ndarray):
        if isinstance(ours, kind) or isinstance(theirs, kind):
            same_kind = isinstance(ours, kind) and isinstance(theirs, kind)
            return same_kind and ours.shape == theirs.shape and bool((ours == theirs).all())
    return bool(ours == theirs)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


class TermStates:
    """The stateful terms that a client has seen, by name, and loaded states of others."""

    def __init__(self) -> None:
        self._terms: dict[str, Stateful] = {}
        # Loaded states, encoded, of terms that no call has mentioned since.
        self._pending: dict[str, Any] = {}

    def add_all(self, terms: Mapping[str, Stateful]) -> None:
        """Keep the state of terms, by name, from now on, and restore those that were loaded.

        Raises:
            StateError: a loaded state is not one of its term.
        """
        for name, term in terms.items():
            if self._terms.get(name) is not term:
                self._restore(name, term)
                self._terms[name] = term

    def encoded(self) -> dict[str, Any]:
        """The state of each term, ready for JSON.

        Raises:
            StateError: a state holds something that JSON cannot.
        """
        states = {name: encode_state(name, term.state_dict()) for name, term in self._terms.items()}
        return {**self._pending, **states}

    def load(self, states: Mapping[str, Any]) -> None:
        """Restore what `encoded` returned; the state of a term that is not known yet waits for it.

        Raises:
            StateError: a state is not one of its term.
        """
        self._pending = dict(states)
        for name, term in self._terms.items():
            self._restore(name, term)

    def _restore(self, name: str, term: Stateful) -> None:
        if name not in self._pending:
            return
        state = decode_state(name, self._pending[name])
        try:
            term.load_state_dict(state)
        except StateError:
            raise
        except Exception as error:  # a term is anyone's, and a damaged state may be anything
            raise StateError(
                f"the state of {name!r} must be what its state_dict returned, and loading it "
                f"failed: {type(error).__name__}: {error}"
            ) from error
        # Only here: a term whose state did not load must not run without it in the next call.
        del self._pending[name]


_TENSOR, _ARRAY = "__tensor__", "__array__"
_KINDS = "biufU"  # of NumPy's dtypes: booleans, whole and floating-point numbers, strings


def encode_state(term: str, state: Any) -> Any:
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
        return encode_state(term, state.item())
    if isinstance(state, np.ndarray) and state.dtype.kind in _KINDS:
        shape = list(state.shape)
        return {_ARRAY: {"dtype": str(state.dtype), "shape": shape, "data": state.ravel().tolist()}}
    if isinstance(state, list | tuple):
        return [encode_state(term, item) for item in state]
    if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
        return {key: encode_state(term, value) for key, value in state.items()}
    raise StateError(
        f"the state of {term!r} must be made of real numbers, strings, dense tensors and arrays "
        f"of them, lists, and mappings with string keys, got {state!r}."
    )


def decode_state(term: str, state: Any) -> Any:
    """Invert `encode_state`, except that tuples come back as lists.

    Raises:
        StateError: a tensor or an array in it is damaged.
    """
    if isinstance(state, list):
        return [decode_state(term, item) for item in state]
    if not isinstance(state, dict):
        return state
    if set(state) not in ({_TENSOR}, {_ARRAY}):
        return {key: decode_state(term, value) for key, value in state.items()}
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


def write_states(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write an encoded state to a file, atomically.

    Raises:
        CheckpointError: the file cannot be written.
    """
    try:
        write_atomic(Path(path).expanduser(), json.dumps(state).encode())
    # A path with a NUL or without a name is a ValueError, "~nobody" a RuntimeError.
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the state must be written to {path}, and: {error}.") from error


def read_states(path: str | Path) -> dict[str, Any]:
    """Read a file that `write_states` wrote.

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
