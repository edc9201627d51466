"""Lowering: base and terms of a batch as one uploadable loss, its inputs, and its results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from steelyard.clients.one_pass.graph_builder import build_graph
from steelyard.clients.one_pass.loss_graph import GraphTerm, LossGraph, UnsuitableTermError
from steelyard.clients.one_pass.request_inputs import RequestInputs
from steelyard.clients.one_pass.term_forms import TermForms
from steelyard.composition import PerDatum, Reduction, Term
from steelyard.errors import InputError

MAX_INPUTS = 16  # of the SDK, the log-probs included
_MAX_GRAPHS = 64


class NotLoweredError(Exception):
    """The terms of a batch cannot run as one uploaded loss.

    Attributes:
        reasons: by term; `""` for those that are of no single term.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        listed = (f"{name}: {why}" if name else why for name, why in reasons.items())
        super().__init__("; ".join(listed))
        self.reasons = reasons


@dataclass(frozen=True)
class Results:
    """Results of the terms, as a pipeline would compute them.

    Attributes:
        values: of the terms, the base loss first.
        metrics: their own metrics.
        products: Gram matrix of their gradients; None unless tracked.
        squared_norm: ‖total gradient‖²; 0 unless tracked.
    """

    values: Sequence[float]
    metrics: Sequence[Mapping[str, float]]
    products: Sequence[Sequence[float]] | None
    squared_norm: float


@dataclass(frozen=True)
class LoweredBatch:
    """One batch, ready to be sent.

    Attributes:
        graph: the loss.
        data: of the request.
        terms: the base loss first.
        inputs: of the batch.
        unmeasured: names of the terms that have nothing to measure in the batch.
    """

    graph: LossGraph
    data: Sequence[Any]
    terms: Sequence[GraphTerm]
    inputs: RequestInputs
    unmeasured: Sequence[str] = ()

    def missing(self, metrics: Mapping[str, float]) -> list[str]:
        """Metrics that the server has promised and not sent."""
        return sorted(self.graph.metric_keys - metrics.keys())

    def results(self, metrics: Mapping[str, float]) -> Results:
        """Results of the terms from the metrics of the server."""
        values, own = [], []
        scales = [1 / each for each in self.denominators]
        for keys, term, scale in zip(self.graph.terms, self.terms, scales, strict=True):
            values.append(metrics[keys.value] * scale)
            form = term.form
            own.append({name: self._metric(name, form, keys, metrics) for name in form.metrics})
        products = None
        if self.graph.products:
            products = [[0.0] * len(values) for _ in values]
            for (i, j), key in self.graph.products.items():
                products[i][j] = products[j][i] = metrics[key] * scales[i] * scales[j]
        return Results(values, own, products, metrics.get(self.graph.squared_norm, 0.0))

    @cached_property
    def denominators(self) -> list[float]:
        """Numbers by which the sums of the terms are divided."""
        return _denominators(self.graph, self.terms, self.inputs)

    def _metric(self, name: str, form: PerDatum, keys: Any, metrics: Mapping[str, float]) -> float:
        known = form.metrics[name]
        if not isinstance(known, tuple):
            return known
        key, rank = keys.metrics[name]
        return metrics[key] / _denominator(known[1], rank, form, self.inputs)


class Lowering:
    """Lowers the terms of batches; graphs are built once for each set of terms."""

    def __init__(self) -> None:
        self._forms = TermForms()
        self._graphs: dict[Hashable, LossGraph] = {}

    def lower(
        self, terms: Sequence[Term], weights: Sequence[float], data: Sequence[Any], *, tracked: bool
    ) -> LoweredBatch:
        """Lower the terms of a batch.

        Args:
            terms: the base loss first.
            weights: their weights at this step.
            data: the batch.
            tracked: whether to compute the Gram matrix.

        Raises:
            NotLoweredError: a term cannot be lowered.
        """
        if not data:
            raise NotLoweredError({"": "the batch is empty"})
        try:
            inputs = RequestInputs(data)
        except InputError as error:
            raise NotLoweredError({"": str(error).rstrip(".")}) from error
        found, keys = self._find_forms(terms, data, inputs)
        count = len(inputs.ranks) + len(terms)  # and a factor for each term
        if count > MAX_INPUTS:
            raise NotLoweredError(
                {"": f"a loss takes at most {MAX_INPUTS} inputs, and this one has {count}"}
            )
        key = (tuple(keys), tuple(inputs.ranks.items()), tracked)
        try:
            if key not in self._graphs:
                if len(self._graphs) >= _MAX_GRAPHS:
                    self._graphs.clear()
                self._graphs[key] = build_graph(found, inputs.ranks, tracked=tracked)
        except UnsuitableTermError as error:
            raise NotLoweredError({error.term: str(error)}) from error
        graph = self._graphs[key]
        names = [term.name for term in found]
        measured = [w for term, w in zip(terms, weights, strict=True) if term.name in names]
        pairs = zip(measured, _denominators(graph, found, inputs), strict=True)
        factors = {f"factor_{index}": weight / by for index, (weight, by) in enumerate(pairs)}
        unmeasured = [term.name for term in terms if term.name not in names]
        return LoweredBatch(graph, inputs.data_with(factors), found, inputs, unmeasured)

    def _find_forms(
        self, terms: Sequence[Term], data: Sequence[Any], inputs: RequestInputs
    ) -> tuple[list[GraphTerm], list[Hashable]]:
        """Forms of the base loss and of the terms that have something to measure, and their keys.

        Raises:
            NotLoweredError: some have none; it lists them all.
        """
        found: list[GraphTerm] = []
        keys: list[Hashable] = []
        reasons: dict[str, str] = {}
        for term in terms:
            try:
                form, key = self._forms.form_of(term, data, inputs.shapes)
                if form is None or not (inputs.counts or form.all_tokens or term.is_base):
                    continue
                found.append(GraphTerm(term.name, form, inputs.add(form)))
                keys.append((key, tuple(found[-1].inputs.items())))
            except UnsuitableTermError as error:
                reasons[term.name] = str(error)
            except InputError as error:
                reasons[term.name] = str(error).rstrip(".")
        if reasons:
            raise NotLoweredError(reasons)
        return found, keys


def _denominators(
    graph: LossGraph, terms: Sequence[GraphTerm], inputs: RequestInputs
) -> list[float]:
    pairs = zip(terms, graph.terms, strict=True)
    return [_denominator(term.form.reduction, keys.rank, term.form, inputs) for term, keys in pairs]


def _denominator(reduction: Reduction, rank: int, form: PerDatum, inputs: RequestInputs) -> float:
    if reduction == "sum":
        return 1.0
    return float(inputs.count(rank, form) if reduction == "mean" else reduction)
