"""Arrays that penalties read, by name: outputs of the base loss, and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from steelyard.errors import InputError
from steelyard.spec import listed

PARAMS = "params"
# A tree of arrays has no static type in JAX.
Tree: TypeAlias = Any


def read_base(result: Any) -> tuple[jax.Array, Tree, Tree]:
    """Split the result of a base loss into its loss, its outputs for penalties, and its aux.

    Raises:
        InputError: it is a tuple of another length, or its loss is no floating-point scalar.
    """
    loss, outputs, aux = result, None, None
    if isinstance(result, tuple):
        if len(result) not in (2, 3):
            raise InputError(
                "base must return a loss, (loss, outputs) or (loss, outputs, aux), got a tuple of "
                f"{len(result)}."
            )
        loss, outputs, aux = (*result, None)[:3]
    if not hasattr(loss, "dtype") or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        kind = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "dtype") else type(loss).__name__
        raise InputError(
            f"base must return a floating-point scalar as its loss, got {kind}: reduce it, for "
            "example with jnp.mean."
        )
    return loss, outputs, aux


class PenaltyInputs:
    """Arrays that are available to penalties.

    Args:
        params: a tree of parameters, read as `params/…`; only its floating-point leaves, since
            modules also hold functions, counters and random keys.
        outputs: of the base: a dict of arrays, one array, or None.
    """

    def __init__(self, params: Tree, outputs: Tree) -> None:
        self._outputs = outputs
        self._leaves = {
            "/".join([PARAMS, *filter(None, [_path(path)])]): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if is_parameter(leaf)
        }

    def read(self, term: str, names: tuple[str, ...] | None) -> Tree:
        """Arrays that a penalty reads.

        Args:
            term: the name of the penalty.
            names: of its inputs; None: the base's outputs, or without any all parameters.

        Raises:
            InputError: there is no array of that name.
        """
        if names is not None:
            return {name: self._lookup(name, term) for name in names}
        # A dict is ambiguous here: the penalty that gets it raises, and lists its keys.
        return self._lookup(PARAMS, term) if self._outputs is None else self._outputs

    def _lookup(self, name: str, term: str) -> Any:
        """The output `name`; or one parameter in its shape, or several as one flat vector."""
        outputs = self._outputs if isinstance(self._outputs, Mapping) else {}
        if name in outputs:
            return outputs[name]
        matches = [
            leaf
            for path, leaf in self._leaves.items()
            if path == name
            or path.startswith(f"{name}/")
            or fnmatchcase(path, name)
            or fnmatchcase(path, f"{name}/*")
        ]
        if not matches:
            parameters = listed(dict.fromkeys([PARAMS, *self._leaves]))
            raise InputError(
                f"penalty {term!r} needs the input {name!r}, got from the base {listed(outputs)}; "
                f"parameters: {parameters}."
            )
        if len(matches) == 1:
            return jnp.asarray(matches[0])
        return jnp.concatenate([jnp.ravel(leaf) for leaf in matches])


def is_parameter(leaf: object) -> bool:
    """Check for a floating-point array or number, which has a gradient."""
    return isinstance(leaf, float) or (
        hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _path(path: Any) -> str:  # a tuple of JAX's kinds of keys
    return jax.tree_util.keystr(path, simple=True, separator="/")
