"""Terms that calls describe by registry names: built once, and found again in later calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from steelyard.spec import RegularizerSpec

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
