"""What penalties read: what the base loss gives beside its loss, and the parameters, by name."""

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
    """The loss, what penalties may read, and what only passes through, as a base gives them."""
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
    """The arrays that penalties may ask for."""

    def __init__(self, params: Tree, outputs: Tree) -> None:
        self._outputs = outputs
        self._leaves = {
            "/".join([PARAMS, *filter(None, [_path(path)])]): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }

    def read(self, term: str, names: tuple[str, ...] | None) -> Tree:
        """The arrays that the penalty `term` names; if it names none, the one there is.

        Raises:
            InputError: There is none of that name, or it cannot be told which is meant.
        """
        if names is not None:
            return {name: self._named(name, term) for name in names}
        # Of named outputs none is meant: the penalty itself says so, and lists them.
        return self._named(PARAMS, term) if self._outputs is None else self._outputs

    def _named(self, name: str, term: str) -> Any:
        """An output; or one parameter as it is; or several, or all, as one vector."""
        outputs = self._outputs if isinstance(self._outputs, Mapping) else {}
        if name in outputs:
            return outputs[name]
        found = [
            leaf
            for path, leaf in self._leaves.items()
            if path == name or path.startswith(f"{name}/") or fnmatchcase(path, name)
        ]
        if not found:
            parameters = listed(dict.fromkeys([PARAMS, *self._leaves]))
            raise InputError(
                f"penalty {term!r} needs the input {name!r}, got from the base {listed(outputs)}; "
                f"parameters: {parameters}."
            )
        if len(found) == 1:
            return jnp.asarray(found[0])
        return jnp.concatenate([jnp.ravel(leaf) for leaf in found])


def _path(path: Any) -> str:  # a tuple of JAX's kinds of keys
    return jax.tree_util.keystr(path, simple=True, separator="/")
