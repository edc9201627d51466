"""What a client can give beyond log-probs: nests of tensors, and the terms' gradients there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, combinations_with_replacement
from typing import Any, TypeAlias

import torch
from torch import Tensor

from steelyard.gradients.gram import cosine

# A tensor, or lists, mappings and dataclasses of nests, with None for what is not there; a
# recursive alias would say no more. A tensor may stand in several places, and is one.
Nest: TypeAlias = Any
# A term's gradient by need: one for each tensor of the nest, None where there is no path to it.
Gradients: TypeAlias = Mapping[str, Sequence[Tensor | None]]


def mapped(nest: Nest, fn: Callable[[Tensor], Any]) -> Nest:
    """The nest with `fn` of each tensor in its places; it is called once for each."""
    known: dict[int, Any] = {}

    def of(inner: Nest) -> Nest:
        if inner is None:
            return None
        if isinstance(inner, Mapping):
            return {key: of(each) for key, each in inner.items()}
        if isinstance(inner, list | tuple):
            return [of(each) for each in inner]
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            names = [field.name for field in dataclasses.fields(inner)]
            return dataclasses.replace(inner, **{name: of(getattr(inner, name)) for name in names})
        if id(inner) not in known:
            known[id(inner)] = fn(inner)
        return known[id(inner)]

    return of(nest)


def tensors_in(nest: Nest) -> Iterator[Tensor]:
    """The tensors of a nest, in order, each once."""
    found: list[Tensor] = []
    mapped(nest, found.append)
    return iter(found)


def leaves_of(nest: Nest) -> Nest:
    """The nest over the same memory, each tensor a leaf that requires a gradient.

    Where some of them require one already, the others are constants.
    """
    some = any(tensor.requires_grad for tensor in tensors_in(nest))
    with torch.inference_mode(mode=False), torch.enable_grad():
        return mapped(nest, lambda t: t.detach().requires_grad_(t.requires_grad or not some))


@dataclass(frozen=True)
class PullBeyond:
    """Where terms pull what they asked for beyond log-probs.

    Attributes:
        totals: the weighted sum of the gradients, by need; None where no term has a path.
        norms: the L2 norm of each term's gradient in its space, by name; empty unless tracked.
        cosines: of each pair of terms of one space.
    """

    totals: Gradients = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    cosines: Mapping[tuple[str, str], float] = field(default_factory=dict)


def combine_beyond(
    gradients: Mapping[str, Gradients], weights: Mapping[str, float], *, tracked: bool
) -> PullBeyond:
    """The weighted sums of the terms' gradients beyond log-probs.

    Args:
        gradients: by the name of the term, then by need. Terms with the same needs have one
            space, and cosines among them.
        weights: by name.
        tracked: whether norms and cosines are wanted.
    """
    totals: dict[str, list[Tensor | None]] = {}
    for name, by_need in gradients.items():
        for need, found in by_need.items():
            so_far = totals.setdefault(need, [None] * len(found))
            for i, gradient in enumerate(found):
                so_far[i] = _added(so_far[i], weights[name], gradient)
    if not tracked:
        return PullBeyond(totals)
    norms: dict[str, float] = {}
    cosines: dict[tuple[str, str], float] = {}
    for space in {tuple(by_need) for by_need in gradients.values()}:
        names = [name for name, by_need in gradients.items() if tuple(by_need) == space]
        products = {
            (a, b): _inner(gradients[a], gradients[b])
            for a, b in combinations_with_replacement(names, 2)
        }
        norms |= {name: math.sqrt(products[name, name]) for name in names}
        cosines |= {
            (a, b): cosine(products[a, b], norms[a] * norms[b]) for a, b in combinations(names, 2)
        }
    return PullBeyond(totals, norms, cosines)


def _added(so_far: Tensor | None, weight: float, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return so_far
    return gradient * weight if so_far is None else so_far.add_(gradient, alpha=weight)


def _inner(a: Gradients, b: Gradients) -> float:
    pairs = ((x, y) for need in a for x, y in zip(a[need], b[need], strict=True))
    return sum(_dot(x, y) for x, y in pairs if x is not None and y is not None)


def _dot(x: Tensor, y: Tensor) -> float:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    product: float = torch.dot(x.reshape(-1).to(dtype), y.reshape(-1).to(dtype)).item()
    return product
