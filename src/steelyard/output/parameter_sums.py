"""Gradients with respect to the parameters, added up over the calls of an optimizer step.

The calls of a step have different log-probs, so that inner products of gradients with respect to
them add up. They have the same parameters, so that the gradients themselves add up,

    ⟨g, h⟩ = ⟨Σ_c s_c g_c, Σ_c t_c h_c⟩        with the shares s and t of the two terms in call c,

which cannot be computed from the norms of the calls. A term over logits and parameters has both
kinds: with P_c = ⟨g_c, h_c⟩ over all its inputs and p_c over the parameters,

    ⟨g, h⟩ = Σ_c s_c t_c (P_c - p_c) + ⟨Σ_c s_c p-part of g_c, Σ_c t_c p-part of h_c⟩.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import Any, TypeAlias

from steelyard.errors import InputError
from steelyard.output.custom_loss import CustomLossOutput

# A tensor, or None, for each parameter. This folder does not import torch.
Row: TypeAlias = Sequence[Any]
# Inputs that hold the model's parameters: those of all layers, and those of the output layer.
_OF_MODEL = frozenset({"parameters", "projection"})


class ParameterSums:
    """Sums, over the calls of a step, of the gradients of terms with respect to the parameters."""

    def __init__(self) -> None:
        self._calls = 0
        self._spaces: dict[str, str] = {}
        self._rows: dict[str, Row] = {}
        self._within: dict[tuple[str, str], float] = {}  # sums of p_c, of terms over both kinds
        self._total: Row | None = None
        self._lacking: str | None = None

    def add(self, output: CustomLossOutput, shares: Mapping[str, float]) -> None:
        """Add the gradients of a call."""
        self._calls += 1
        spaces = {name: space for name, space in _spaces(output) if _has_parameters(space)}
        known = output.parameter_gradients or {}
        self._lacking = next((name for name in spaces if name not in known), self._lacking)
        factors = {name: shares.get(name, 1.0) for name in spaces if name in known}
        rows = {name: known[name] for name in factors}
        for name in list(rows):
            term = output.regularizers.get(name)
            if term is not None and term.bound is not None:  # its weight differs from call to call
                weighted = weighted_name(name)
                rows[weighted], factors[weighted] = rows[name], term.weight
                spaces[weighted] = spaces[name]
        self._spaces |= spaces
        mixed = [name for name in rows if spaces[name] != "parameters"]
        for a, b in combinations_with_replacement(mixed, 2):
            if spaces[a] != spaces[b]:
                continue
            product = factors[a] * factors[b] * _product(rows[a], rows[b])
            self._within[a, b] = self._within.get((a, b), 0.0) + product
        for name, row in rows.items():
            self._rows[name] = _plus(self._rows.get(name), factors[name], row)
        if output.total_grad_norm is not None and output.grad_space == "parameters":
            total = list(_leaves(output.extra_gradients.get("parameters")))
            self._total = _plus(self._total, 1.0, total)

    def check(self) -> None:
        """Check that the gradients of all calls are known, unless there is only one.

        Raises:
            InputError: they are not.
        """
        if self._lacking is not None and self._calls > 1:
            raise InputError(
                f"norms over several calls with respect to parameters need the gradients of each "
                f"call, and an output has no parameter_gradients of {self._lacking!r}: pass shares "
                f"to each call, {{}} if all terms are sums, and combine the outputs before they "
                f"are pickled or written as JSON."
            )

    def has(self, name: str) -> bool:
        """Whether the gradient of a term is a sum of gradients."""
        return self._calls > 1 and name in self._rows

    def product(self, a: str, b: str, of_calls: float) -> float:
        """⟨g, h⟩ of two terms over the step.

        Args:
            a: name of a term.
            b: name of a term with a gradient in the same space.
            of_calls: Σ_c s_c t_c P_c.
        """
        if not (self.has(a) and self.has(b)):
            return of_calls
        summed = _product(self._rows[a], self._rows[b])
        if self._spaces[a] == "parameters":
            return summed
        within = self._within.get((a, b), self._within.get((b, a), 0.0))
        return max(0.0, of_calls - within) + summed if a == b else of_calls - within + summed

    def total_norm(self, of_calls: float) -> float:
        """Norm of the gradient of the loss over the step; that of the calls if they are apart."""
        total = self._total
        return of_calls if total is None or self._calls == 1 else math.sqrt(_product(total, total))


def weighted_name(name: str) -> str:
    """Name under which the contribution of a term with a bound is added up."""
    return f"{name}/weighted"


def _spaces(output: CustomLossOutput) -> Iterator[tuple[str, str]]:
    """Names of the terms with a norm, and what it is with respect to."""
    if output.base_loss.grad_norm is not None:
        yield "base", output.grad_space
    for name, term in output.regularizers.items():
        if term.grad_norm is not None:
            yield name, term.grad_space


def _has_parameters(space: str) -> bool:
    return not _OF_MODEL.isdisjoint(space.split("+"))


def _plus(total: Row | None, factor: float, row: Row) -> Row:
    scaled = [None if x is None else factor * x for x in row]
    if total is None:
        return scaled
    return [
        y if x is None else x if y is None else x + y for x, y in zip(total, scaled, strict=True)
    ]


def _product(a: Row, b: Row) -> float:
    """Inner product, in float64."""
    dots = [
        (x.double() * y.double()).sum()
        for x, y in zip(a, b, strict=True)
        if x is not None and y is not None
    ]
    return float(sum(dots))


def _leaves(nest: Any) -> Iterator[Any]:
    """Tensors and Nones of a nest, in order."""
    if isinstance(nest, Mapping):
        nest = nest.values()
    elif not isinstance(nest, list | tuple):
        yield nest
        return
    for inner in nest:
        yield from _leaves(inner)
