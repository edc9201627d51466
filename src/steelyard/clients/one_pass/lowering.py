"""Lowering: base and terms of a batch as one uploadable loss, its inputs, and its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from steelyard.clients.client_pass import tensor_like
from steelyard.clients.one_pass.loss_graph import (
    LOGPROBS,
    MASK,
    OWNER,
    GraphTerm,
    LossGraph,
    UnsuitableTermError,
    build_graph,
)
from steelyard.clients.one_pass.term_forms import TermForms
from steelyard.composition.own_data import JoinedData, batch_of, data_of
from steelyard.composition.per_datum import PerDatum, Reduction
from steelyard.composition.terms import Term
from steelyard.errors import InputError
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input, token_mask


class RequestInputs:
    """Inputs of the terms of one batch; a field that several terms read is sent once.

    Args:
        data: the batch; or a `JoinedData`, with the data of terms' own.

    Attributes:
        shapes: of the log-probs of each datum.
        ranks: rank of each input, by name: the log-probs, the mask, whose data a datum is if terms
            have data of their own, then the fields.

    Raises:
        InputError: a datum has no target tokens, or its mask does not fit them.
    """

    def __init__(self, data: Any) -> None:
        self._joined = data if isinstance(data, JoinedData) else None
        self._data: Sequence[Any] = data.data if isinstance(data, JoinedData) else data
        self.shapes = [_target_shape(index, datum) for index, datum in enumerate(self._data)]
        ranks = {len(shape) for shape in self.shapes}
        if len(ranks) != 1:
            raise InputError(f"all data must have targets of one rank, got {sorted(ranks)}.")
        masks = [token_mask(d, i, shape) for i, (d, shape) in enumerate(self._rows())]
        self._masks = [
            torch.ones(shape[0]) if mask is None else mask.float()
            for mask, shape in zip(masks, self.shapes, strict=True)
        ]
        self._tensors: dict[str, Sequence[Tensor]] = {MASK: self._masks}
        self._names: dict[Any, str] = {}
        self._added: set[tuple[str, range]] = set()
        self.ranks = {LOGPROBS: ranks.pop(), MASK: 1}
        if self._joined is not None:
            self.ranks[OWNER] = 0
            owners = [0] * len(self._joined.batch)
            for number, own in enumerate(self._joined.own.values(), 1):
                owners += [number] * len(own)
            self._tensors[OWNER] = [torch.tensor(float(owner)) for owner in owners]

    def place_of(self, term: str) -> range:
        """Indices, among all data of the request, of those that a term reads."""
        every = range(len(self._data))
        return every if self._joined is None else every[self._joined.slice_of(term)]

    def owner_of(self, term: str) -> int | None:
        """The value of `OWNER` for the data that a term reads; None if all terms read all data."""
        if self._joined is None:
            return None
        return {name: number for number, name in enumerate(self._joined.own, 1)}.get(term, 0)

    def counts(self, term: str) -> bool:
        """Whether a token of the data that a term reads counts."""
        return any(bool(self._masks[index].any()) for index in self.place_of(term))

    def add(self, term: str, form: PerDatum) -> dict[str, str]:
        """Add the fields of a term; names of the inputs, by the names of the fields.

        Raises:
            InputError: a field is missing, or has the wrong shape.
        """
        place = self.place_of(term)
        return {name: self._add(source, form, place) for name, source in form.fields.items()}

    def count(self, rank: int, term: str, form: PerDatum) -> int:
        """Number of values that a term reads, at least 1: of data, of tokens, or of classes."""
        place = self.place_of(term)
        if rank == 0:
            return len(place)
        tokens = [
            self.shapes[index][0] if form.all_tokens else int(self._masks[index].sum())
            for index in place
        ]
        if rank == 1:
            return max(sum(tokens), 1)
        pairs = zip(tokens, place, strict=True)
        return max(sum(count * self.shapes[index][1] for count, index in pairs), 1)

    def of_datum(self, index: int, names: Mapping[str, str]) -> tuple[Tensor, dict[str, Tensor]]:
        """Mask of a datum, and its inputs by the names of the fields."""
        fields = {name: self._tensors[field][index] for name, field in names.items()}
        return self._masks[index], fields

    def data_with(self, numbers: Mapping[str, float]) -> list[Any]:
        """The data of the request, each with the inputs and with these numbers."""
        request = []
        for index, datum in enumerate(self._data):
            targets = datum.loss_fn_inputs["target_tokens"]
            inputs = {"target_tokens": targets} | {
                name: tensor_like(targets, tensors[index])
                for name, tensors in self._tensors.items()
            }
            inputs |= {
                name: tensor_like(targets, torch.tensor(value)) for name, value in numbers.items()
            }
            request.append(replace(datum, loss_fn_inputs=inputs))
        return request

    def _rows(self) -> list[tuple[Any, torch.Size]]:
        return list(zip(self._data, self.shapes, strict=True))

    def _add(self, source: Any, form: PerDatum, place: range) -> str:
        named = isinstance(source, str) or callable(source)
        key = (source, form.all_tokens) if named else object()
        name = self._names.setdefault(key, f"field_{len(self._names)}")
        if (name, place) not in self._added:
            read = self._read(source, form, place) if named else self._check(source, place)
            self.ranks[name] = rank = read[0].dim()
            # 1 for data that no term reads it of: the values there, which are left out, are finite
            # also if a term divides by the field.
            ones = [torch.ones(shape[:rank]) for shape in self.shapes]
            tensors = list(self._tensors.get(name, ones))
            tensors[place.start : place.stop] = read
            self._tensors[name] = tensors
            self._added.add((name, place))
        return name

    def _read(
        self, source: str | Callable[[Any, int], Any], form: PerDatum, place: range
    ) -> list[Tensor]:
        """Field of each datum, in the shape of its log-probs; 0 where a token does not count.

        The index of a datum is that among the data that the term reads.
        """
        values_by_datum = []
        for index, at in enumerate(place):
            datum, shape = self._data[at], self.shapes[at]
            given = source(datum, index) if callable(source) else loss_fn_input(datum, source)
            if given is None:
                raise InputError(f"datum {index} must have {source!r}, got none.", datum=index)
            values = as_tensor(given).detach().float().cpu()
            if values.shape != shape:
                raise InputError(
                    f"{source!r} of datum {index} must have the shape of its log-probs, "
                    f"{list(shape)}, got {list(values.shape)}.",
                    datum=index,
                )
            mask = self._masks[at] != 0
            kept = mask if values.dim() == 1 else mask.unsqueeze(-1)
            values_by_datum.append(values if form.all_tokens else torch.where(kept, values, 0.0))
        return values_by_datum

    def _check(self, tensors: Sequence[Tensor], place: range) -> list[Tensor]:
        """Known tensors, whose shapes must be the first dimensions of those of the log-probs."""
        on_cpu = [tensor.detach().float().cpu() for tensor in tensors]
        shapes = [tensor.shape for tensor in on_cpu]
        of_data = self.shapes[place.start : place.stop]
        expected = [shape[: len(own)] for own, shape in zip(shapes, of_data, strict=True)]
        if shapes != expected or len({len(shape) for shape in shapes}) != 1:
            raise InputError(
                f"a tensor of each datum must have rank 0 or the shape of its log-probs, got "
                f"{[list(shape) for shape in shapes]}."
            )
        return on_cpu


def _target_shape(index: int, datum: Any) -> torch.Size:
    targets = loss_fn_input(datum, "target_tokens")
    if targets is None:
        raise InputError(f"data[{index}].loss_fn_inputs must hold 'target_tokens'.", datum=index)
    shape = getattr(targets, "shape", None)
    return torch.Size(as_tensor(targets).shape if shape is None else shape)


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
        scales = [1 / denominator for denominator in self.denominators]
        for keys, term, scale in zip(self.graph.terms, self.terms, scales, strict=True):
            values.append(metrics[keys.value] * scale)
            form = term.form
            own.append({name: self._metric(name, term, keys, metrics) for name in form.metrics})
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

    def _metric(self, name: str, term: GraphTerm, keys: Any, metrics: Mapping[str, float]) -> float:
        known = term.form.metrics[name]
        if not isinstance(known, tuple):
            return known
        key, rank = keys.metrics[name]
        return metrics[key] / _denominator(known[1], rank, term, self.inputs)


class Lowering:
    """Lowers the terms of batches; graphs are built once for each set of terms."""

    def __init__(self) -> None:
        self._forms = TermForms()
        self._graphs: dict[Hashable, LossGraph | UnsuitableTermError] = {}

    def lower(
        self, terms: Sequence[Term], weights: Sequence[float], data: Any, *, tracked: bool
    ) -> LoweredBatch:
        """Lower the terms of a batch.

        Args:
            terms: the base loss first.
            weights: their weights at this step.
            data: the batch; or a `JoinedData`.
            tracked: whether to compute the Gram matrix.

        Raises:
            NotLoweredError: a term cannot be lowered.
        """
        if not batch_of(data):
            raise NotLoweredError({"": "the batch is empty"})
        try:
            inputs = RequestInputs(data)
        except InputError as error:
            raise NotLoweredError({"": str(error).rstrip(".")}) from error
        forms, keys = self._find_forms(terms, data, inputs)
        count = len(inputs.ranks) + len(terms)  # and a factor for each term
        if count > MAX_INPUTS:
            raise NotLoweredError(
                {"": f"a loss takes at most {MAX_INPUTS} inputs, and this one has {count}"}
            )
        key = (tuple(keys), tuple(inputs.ranks.items()), tracked)
        if key not in self._graphs:
            if len(self._graphs) >= _MAX_GRAPHS:
                self._graphs.clear()
            self._graphs[key] = _graph_or_error(forms, inputs.ranks, tracked=tracked)
        graph = self._graphs[key]
        if isinstance(graph, UnsuitableTermError):
            raise NotLoweredError({graph.term: str(graph)}) from graph
        names = [term.name for term in forms]
        measured = [w for term, w in zip(terms, weights, strict=True) if term.name in names]
        pairs = zip(measured, _denominators(graph, forms, inputs), strict=True)
        factors = {f"factor_{index}": weight / by for index, (weight, by) in enumerate(pairs)}
        unmeasured = [term.name for term in terms if term.name not in names]
        return LoweredBatch(graph, inputs.data_with(factors), forms, inputs, unmeasured)

    def _find_forms(
        self, terms: Sequence[Term], data: Any, inputs: RequestInputs
    ) -> tuple[list[GraphTerm], list[Hashable]]:
        """Forms of the base loss and of the terms that have something to measure, and their keys.

        Raises:
            NotLoweredError: some have none; it lists them all.
        """
        forms: list[GraphTerm] = []
        keys: list[Hashable] = []
        reasons: dict[str, str] = {}
        for term in terms:
            try:
                place = inputs.place_of(term.name)
                shapes = inputs.shapes[place.start : place.stop]
                form, key = self._forms.form_of(term, data_of(data, term.name), shapes)
                counts = form is not None and (form.all_tokens or inputs.counts(term.name))
                if form is None or not (counts or term.is_base):
                    continue
                owner, fields = inputs.owner_of(term.name), inputs.add(term.name, form)
                forms.append(GraphTerm(term.name, form, fields, owner))
                keys.append((key, owner, tuple(fields.items())))
            except UnsuitableTermError as error:
                reasons[term.name] = str(error)
            except InputError as error:
                reasons[term.name] = str(error).rstrip(".")
        if reasons:
            raise NotLoweredError(reasons)
        return forms, keys


def _graph_or_error(
    terms: Sequence[GraphTerm], ranks: Mapping[str, int], *, tracked: bool
) -> LossGraph | UnsuitableTermError:
    """Build a graph, or return why there is none, for a reason that holds at every step."""
    try:
        return build_graph(terms, ranks, tracked=tracked)
    except UnsuitableTermError as error:
        return error


def _denominators(
    graph: LossGraph, terms: Sequence[GraphTerm], inputs: RequestInputs
) -> list[float]:
    pairs = zip(terms, graph.terms, strict=True)
    return [_denominator(term.form.reduction, keys.rank, term, inputs) for term, keys in pairs]


def _denominator(reduction: Reduction, rank: int, term: GraphTerm, inputs: RequestInputs) -> float:
    if reduction == "sum":
        return 1.0
    count = inputs.count(rank, term.name, term.form)
    return float(count if reduction == "mean" else reduction)
