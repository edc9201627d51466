"""Building the graph of a loss: base and terms of one datum, its gradient, and the metrics.

With s_i the sum of the values of term i over the tokens of a datum that count, f_i its factor
(weight ÷ denominator, an input) and g_i = ∂s_i/∂logprobs, the loss of a datum is Σ f_i s_i, and its
gradient G = Σ f_i g_i. The graph computes G itself, as operations on constants, and the loss is

    Σ f_i s_i + ((logprobs - logprobs.detach()) · G).sum(),

whose value is the first sum and whose gradient is G, so that the server has nothing left to
differentiate. A gradient that is not finite makes the loss NaN (0 · inf), which servers refuse.
The metrics are sums over data: s_i, the terms' own metrics, and if tracked the inner products
⟨g_i, g_j⟩ and ⟨G, G⟩, which add up because data have separate log-probs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, fx

from steelyard.clients.one_pass.loss_graph import (
    LOGPROBS,
    MASK,
    GraphTerm,
    LossGraph,
    TermKeys,
    UnsuitableTermError,
)
from steelyard.clients.one_pass.reverse_mode import add_gradient, evaluate_sample, sample_of
from steelyard.clients.one_pass.sample import SAMPLE_SHAPE, check_on_sample, sample_inputs
from steelyard.clients.one_pass.symbols import Symbol, SymbolTracer
from steelyard.composition import PerDatum


def build_graph(
    terms: Sequence[GraphTerm], ranks: Mapping[str, int], *, tracked: bool
) -> LossGraph:
    """Build the graph of a loss, and compare it with autograd.

    Args:
        terms: the base loss first.
        ranks: rank of each input: the log-probs, the mask, the fields. Those of the factors, one
            for each term, are added.
        tracked: whether to compute the inner products.

    Raises:
        UnsuitableTermError: a term cannot be traced or differentiated.
    """
    graph = _Builder(terms, ranks).build(tracked=tracked)
    try:
        check_on_sample(graph, terms)
    except Exception as error:
        for term in terms if len(terms) > 1 else ():  # to know which
            build_graph([term], ranks, tracked=tracked)
        name = terms[0].name if len(terms) == 1 else ""
        raise UnsuitableTermError(name, _brief(error)) from error
    return graph


@dataclass(frozen=True)
class _Traced:
    """A term in the graph: its form, values, what is differentiated for them, and metrics."""

    name: str
    form: PerDatum
    values: Symbol
    surrogate: Symbol
    metrics: Mapping[str, Symbol]


class _Builder:
    def __init__(self, terms: Sequence[GraphTerm], ranks: Mapping[str, int]) -> None:
        factors = [f"factor_{index}" for index in range(len(terms))]
        self._ranks = {**ranks, **dict.fromkeys(factors, 0)}
        self._graph = fx.Graph()
        tracer = SymbolTracer(self._graph)
        self._inputs = {name: tracer.symbol(name) for name in self._ranks}
        self._factors = [self._inputs[name] for name in factors]
        self._sample = sample_inputs(self._ranks)
        self._leaf = self._inputs[LOGPROBS].detach()
        self._kept = self._inputs[MASK] != 0
        self._metrics: dict[str, Symbol] = {}
        self._terms = [self._trace(term) for term in terms]

    def build(self, *, tracked: bool) -> LossGraph:
        sums = [self._sum(term.values, term.form) for term in self._terms]
        keys = [self._keys(index, total) for index, total in enumerate(sums)]
        products: dict[tuple[int, int], str] = {}
        squared_norm = ""
        if tracked:
            gradients = [self._gradient({term.name: (term, 1.0)}) for term in self._terms]
            total = _weighted(self._factors, gradients)
            products = self._products(gradients)
            squared_norm = self._metric("n", total.double().square().sum())
        else:
            pairs = zip(self._terms, self._factors, strict=True)
            total = self._gradient({term.name: (term, factor) for term, factor in pairs})
        linear = ((self._inputs[LOGPROBS] - self._leaf) * total).sum()
        loss = _weighted(self._factors, sums) + linear
        metrics = {key: symbol.node for key, symbol in self._metrics.items()}
        self._graph.output((loss.node, metrics))
        _merge_equal_nodes(self._graph)
        self._graph.eliminate_dead_code()
        return LossGraph(self._graph, self._ranks, keys, products, squared_norm)

    def _trace(self, term: GraphTerm) -> _Traced:
        form = term.form
        logprobs = self._leaf if form.all_tokens else self._where_kept(self._leaf)
        fields = {name: self._inputs[each] for name, each in term.inputs.items()}
        try:
            values = form.values(logprobs, **fields)
            surrogate = values if form.gradient_of is None else form.gradient_of(logprobs, **fields)
            metrics = {name: fn(logprobs, **fields) for name, fn in term.functions.items()}
            # torch.fx adds the node of an attribute when it is first asked for.
            found = [getattr(each, "node", None) for each in (values, surrogate, *metrics.values())]
            evaluate_sample(self._graph, self._sample)
        except Exception as error:  # a term is anyone's, and torch.fx raises whatever it likes
            raise UnsuitableTermError(term.name, f"it cannot be traced: {_brief(error)}") from error
        for node in found:
            _check_shape(term.name, node)
        return _Traced(term.name, form, values, surrogate, metrics)

    def _rank(self, values: Symbol) -> int:
        evaluate_sample(self._graph, self._sample)
        rank: int = sample_of(values.node).dim()
        return rank

    def _where_kept(self, values: Symbol, otherwise: float = 0.0) -> Symbol:
        """Values of the tokens that count, 0 for the others."""
        kept = self._kept if self._rank(values) == 1 else self._kept.unsqueeze(-1)
        return torch.where(kept, values, otherwise)

    def _sum(self, values: Symbol, form: PerDatum) -> Symbol:
        if not self._rank(values):
            return values
        return (values if form.all_tokens else self._where_kept(values)).sum()

    def _keys(self, index: int, total: Symbol) -> TermKeys:
        term = self._terms[index]
        own = {
            name: (
                self._metric(f"m/{index}.{place}", self._sum(each, term.form)),
                self._rank(each),
            )
            for place, (name, each) in enumerate(term.metrics.items())
        }
        return TermKeys(self._metric(f"v/{index}", total), self._rank(term.values), own)

    def _metric(self, name: str, value: Symbol) -> str:
        # By index: the names of terms may hold characters that the server does not take.
        key = f"custom/{name}:sum"
        self._metrics[key] = value
        return key

    def _gradient(self, terms: Mapping[str, tuple[_Traced, Symbol | float]]) -> Symbol:
        """Gradient of the sum of some terms, each times a factor.

        Raises:
            UnsuitableTermError: an operation of a term has no derivative here.
        """
        seeds = [(term.surrogate, self._seed(term, factor)) for term, factor in terms.values()]
        try:
            return add_gradient(seeds, self._leaf)
        except Exception as error:
            for name, each in terms.items() if len(terms) > 1 else ():  # to know which
                self._gradient({name: each})
            raise UnsuitableTermError(next(iter(terms)), _brief(error)) from error

    def _seed(self, term: _Traced, factor: Symbol | float) -> Symbol:
        """Gradient of the sum over the tokens that count, times the factor."""
        rank = self._rank(term.surrogate)
        if not rank or term.form.all_tokens:
            ones: Symbol = torch.ones_like(term.surrogate)
            return ones * factor if isinstance(factor, fx.Proxy) else ones
        kept = self._kept if rank == 1 else self._kept.unsqueeze(-1).expand_as(term.surrogate)
        return torch.where(kept, factor, 0.0)

    def _products(self, gradients: Sequence[Symbol]) -> dict[tuple[int, int], str]:
        # In float64, as the Gram matrix of a pipeline where float32 would lose digits.
        flat = gradients
        if self._ranks[LOGPROBS] > 1:
            flat = [each.flatten() for each in gradients]
        rows: Symbol = torch.stack(list(flat)).double()
        matrix = rows @ rows.transpose(0, 1)
        return {
            (i, j): self._metric(f"g/{i}.{j}", matrix[i, j])
            for i, j in combinations_with_replacement(range(len(gradients)), 2)
        }


def _check_shape(term: str, node: Any) -> None:
    sample = sample_of(node) if isinstance(node, fx.Node) else None
    shape = tuple(sample.shape) if isinstance(sample, Tensor) else None
    if shape not in ((), SAMPLE_SHAPE[:1], SAMPLE_SHAPE):
        got = "no tensor" if shape is None else f"the rank {len(shape)}"
        raise UnsuitableTermError(
            term, f"its values must be one number, or have the shape of the log-probs, got {got}"
        )


def _weighted(factors: Iterable[Symbol], summands: Iterable[Symbol]) -> Symbol:
    first, *rest = (factor * each for factor, each in zip(factors, summands, strict=True))
    for each in rest:
        first = first + each
    return first


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _merge_equal_nodes(graph: fx.Graph) -> None:
    """Replace each operation by an earlier one with the same function and arguments."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        key = (node.op, node.target, repr(node.args), repr(node.kwargs))
        earlier = known.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
