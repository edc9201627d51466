"""Graph of a loss that is uploaded: base and terms of one datum, its gradient, and the metrics.

With s_i the sum of the values of term i over the tokens of a datum that count, f_i its factor
(weight ÷ denominator, an input) and g_i = ∂s_i/∂logprobs, the loss of a datum is Σ f_i s_i, and its
gradient G = Σ f_i g_i. The graph computes G itself, as operations on constants (those of autograd,
traced), and the loss is

    Σ f_i s_i + ((logprobs - logprobs.detach()) · G).sum(),

whose value is the first sum and whose gradient is G, so that the server has nothing left to
differentiate. A gradient that is not finite makes the loss NaN (0 · inf), which servers refuse.
Where terms have data of their own, the request has these and the batch, and s_i is 0 for the data
that term i does not read. The metrics are sums over data: s_i, the terms' own metrics, and if
tracked the inner products ⟨g_i, g_j⟩ and ⟨G, G⟩, which add up because data have separate log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, fx

from steelyard.clients.one_pass.torch_operations import SymbolTracer, append_operations
from steelyard.composition.per_datum import PerDatum

# Whose data a datum is: 0 of the batch, n of the n-th term with data of its own.
LOGPROBS, MASK, OWNER = "logprobs", "mask", "owner"


class UnsuitableTermError(Exception):
    """A term cannot be part of an uploaded loss; the message says why.

    Attributes:
        term: its name.
    """

    def __init__(self, term: str, reason: str) -> None:
        super().__init__(reason)
        self.term = term


@dataclass(frozen=True)
class GraphTerm:
    """A term of the graph.

    Attributes:
        name: of the term.
        form: its functions.
        inputs: names of the graph's inputs, by the names of the form's fields.
        owner: the value of the input `OWNER` for the data that the term reads; None: it reads all.
    """

    name: str
    form: PerDatum
    inputs: Mapping[str, str]
    owner: int | None = None

    @property
    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """Its metrics that are functions, by name."""
        metrics = self.form.metrics.items()
        return {name: metric[0] for name, metric in metrics if isinstance(metric, tuple)}

    def sums(
        self, logprobs: Tensor, mask: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Sum of the values for one datum, and of what is differentiated, by calling the form."""
        form, kept = self.form, self.kept(logprobs, mask)
        values = form.values(kept, **fields)
        other = values if form.gradient_of is None else form.gradient_of(kept, **fields)
        return self.kept(values, mask).sum(), self.kept(other, mask).sum()

    def kept(self, values: Tensor, mask: Tensor) -> Tensor:
        """Values of the tokens that count, 0 for the others."""
        if self.form.all_tokens or not values.dim():
            return values
        rows = mask != 0
        return torch.where(rows if values.dim() == 1 else rows.unsqueeze(-1), values, 0.0)


@dataclass(frozen=True)
class GraphKeys:
    """Names of the metrics in which an uploaded loss returns one term.

    Attributes:
        value: of s_i.
        rank: of its values: 0 for one number per datum, else values of tokens, or of classes.
        metrics: of its own metrics, with their ranks, by name.
    """

    value: str
    rank: int
    metrics: Mapping[str, tuple[str, int]]

    @property
    def names(self) -> list[str]:
        """All of them, the value first."""
        return [self.value, *(key for key, _ in self.metrics.values())]


@dataclass(frozen=True)
class LossGraph:
    """An uploadable loss.

    Attributes:
        graph: its operations; the output is (loss, metrics).
        ranks: rank of each input, in order, the log-probs first.
        terms: metrics of each term.
        products: metric of ⟨g_i, g_j⟩, i ≤ j; empty unless tracked.
        squared_norm: metric of ⟨G, G⟩; empty unless tracked.
    """

    graph: fx.Graph
    ranks: Mapping[str, int]
    terms: Sequence[GraphKeys]
    products: Mapping[tuple[int, int], str] = field(default_factory=dict)
    squared_norm: str = ""

    @cached_property
    def key(self) -> Any:
        """Identifies the graph and its inputs."""
        return self.graph.python_code("self").src, tuple(self.ranks.items())

    @cached_property
    def metric_keys(self) -> frozenset[str]:
        """Keys of the metrics that the server promises to send."""
        output: Any = self.graph.output_node().args[0]  # (loss, metrics)
        return frozenset(output[1])

    def function(self) -> Callable[..., Any]:
        """The graph as a function whose parameters are the inputs, to be traced by the SDK."""
        module = fx.GraphModule({}, self.graph)
        names = ", ".join(self.ranks)
        # The SDK and torch.fx read the names of parameters from the code of a function.
        scope: dict[str, Any] = {"run": fx.Interpreter(module).run}
        exec(f"def steelyard_loss({names}):\n    return run({names})", scope)  # noqa: S102 - our names
        function: Callable[..., Any] = scope["steelyard_loss"]
        return function


SAMPLE_SHAPE = (5, 3)  # tokens and classes: different, so that no two dimensions look alike
OTHER_SHAPE = (7, 2)  # of a second sample: a graph must not depend on the sizes of the first


def sample_inputs(
    ranks: Mapping[str, int], shape: tuple[int, int] = SAMPLE_SHAPE
) -> dict[str, Tensor]:
    """Random inputs of one datum with so many tokens and classes, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    # All like log-probs, as most are; classes with at most a third of the mass leave a tail.
    drawn = {
        name: torch.rand(shape[:rank], generator=generator).mul(0.3).add(1e-3).log()
        for name, rank in ranks.items()
    }
    drawn[MASK] = (torch.arange(shape[0]) != 1).float()
    return drawn


def check_on_sample(graph: LossGraph, terms: Sequence[GraphTerm]) -> None:
    """Compare the values and the gradient of a graph with those of its terms by autograd.

    Raises:
        ValueError: they differ.
        Exception: whatever an operation of the gradient raises.
    """
    for owner in sorted({term.owner or 0 for term in terms}):
        for shape in (SAMPLE_SHAPE, OTHER_SHAPE):
            sample = sample_inputs(graph.ranks, shape)
            if OWNER in sample:
                sample[OWNER] = torch.tensor(float(owner))
            _compare_on(sample, graph, terms, owner)


def _compare_on(
    sample: dict[str, Tensor], graph: LossGraph, terms: Sequence[GraphTerm], owner: int
) -> None:
    logprobs = sample[LOGPROBS].requires_grad_()
    loss, metrics = fx.GraphModule({}, graph.graph)(**sample)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = torch.zeros_like(gradient)
    for index, term in enumerate(terms):
        leaf = logprobs.detach().requires_grad_()
        fields = {name: sample[source] for name, source in term.inputs.items()}
        value, surrogate = term.sums(leaf, sample[MASK], fields)
        (own,) = torch.autograd.grad(surrogate, leaf)
        if term.owner not in (None, owner):
            value, own = torch.zeros_like(value), torch.zeros_like(own)
        expected = expected + sample[f"factor_{index}"] * own
        traced = metrics[graph.terms[index].value]
        if not _close(traced, value):
            raise ValueError(f"traced it gives {traced}, and called {value}")
    if not _close(gradient, expected):
        raise ValueError("the gradient differs from that of autograd")


def _close(value: Tensor, expected: Tensor) -> bool:
    return torch.allclose(value.double(), expected.double(), rtol=1e-4, atol=1e-6)


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
    try:
        graph = _build(terms, ranks, tracked=tracked)
        check_on_sample(graph, terms)
    except UnsuitableTermError:
        raise
    except Exception as error:
        for term in terms if len(terms) > 1 else ():  # to know which
            build_graph([term], ranks, tracked=tracked)
        name = terms[0].name if len(terms) == 1 else ""
        raise UnsuitableTermError(name, _brief(error)) from error
    return graph


@dataclass(frozen=True)
class _RecordedTerm:
    """A term whose functions were recorded.

    Attributes:
        term: the term.
        module: its functions: log-probs and fields to the values, what is differentiated for them,
            and its metrics.
        ranks: of these results.
    """

    term: GraphTerm
    module: fx.GraphModule
    ranks: Sequence[int]

    def sums(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Sum each result over the tokens that count."""
        logprobs = inputs[LOGPROBS]
        fields = {name: inputs[source] for name, source in self.term.inputs.items()}
        kept = partial(self.term.kept, mask=inputs[MASK])
        sums = [kept(result).sum() for result in self.module(kept(logprobs), **fields)]
        if self.term.owner is None:
            return sums
        reads = inputs[OWNER] == self.term.owner
        return [torch.where(reads, total, 0.0) for total in sums]


def _record(term: GraphTerm, ranks: Mapping[str, int]) -> _RecordedTerm:
    """Record the functions of a term, which must not branch on values or on sizes.

    Raises:
        UnsuitableTermError: they cannot be recorded, or their results have other shapes.
    """
    graph = fx.Graph()
    tracer = SymbolTracer(graph)
    logprobs = tracer.symbol(LOGPROBS)
    fields = {name: tracer.symbol(name) for name in term.inputs}
    form = term.form
    functions = [form.values, form.gradient_of or form.values, *term.functions.values()]
    sample = sample_inputs(ranks)
    known = {name: sample[source] for name, source in term.inputs.items()}
    try:
        results = [function(logprobs, **fields) for function in functions]
        # torch.fx adds the node of an attribute when it is first asked for.
        graph.output([getattr(result, "node", result) for result in results])
        module = fx.GraphModule({}, graph)
        values = module(sample[LOGPROBS], **known)
    except Exception as error:  # a term is anyone's, and torch.fx raises whatever it likes
        raise UnsuitableTermError(term.name, f"it cannot be traced: {_brief(error)}") from error
    for value in values:
        _check_shape(term.name, value)
    return _RecordedTerm(term, module, [value.dim() for value in values])


def _check_shape(term: str, value: Any) -> None:
    shape = tuple(value.shape) if isinstance(value, Tensor) else None
    if shape not in ((), SAMPLE_SHAPE[:1], SAMPLE_SHAPE):
        got = "no tensor" if shape is None else f"the rank {len(shape)}"
        raise UnsuitableTermError(
            term, f"its values must be one number, or have the shape of the log-probs, got {got}"
        )


def _build(terms: Sequence[GraphTerm], ranks: Mapping[str, int], *, tracked: bool) -> LossGraph:
    """Trace the loss and its gradient."""
    factors = [f"factor_{index}" for index in range(len(terms))]
    ranks = {**ranks, **dict.fromkeys(factors, 0)}
    recorded = [_record(term, ranks) for term in terms]
    keys = [_keys(index, term) for index, term in enumerate(recorded)]
    pairs = list(combinations_with_replacement(range(len(terms)), 2)) if tracked else []
    products = {(i, j): _metric(f"g/{i}.{j}") for i, j in pairs}
    squared_norm = _metric("n") if tracked else ""

    def compute(*tensors: Tensor) -> list[Tensor]:
        """Loss of a datum, its gradient G, and the metrics in the order of `names`."""
        inputs = dict(zip(ranks, tensors, strict=True))
        leaf = inputs[LOGPROBS].requires_grad_()
        sums, gradients = [], []
        with torch.enable_grad():
            for term in recorded:
                value, surrogate, *own = term.sums(inputs)
                gradients.append(_gradient(term.term.name, surrogate, leaf))
                sums.append([value, *own])
        weights = [inputs[name] for name in factors]
        loss = _weighted(weights, [value for value, *_ in sums])
        total = _weighted(weights, gradients)
        metrics = [metric for own in sums for metric in own]
        if tracked:
            # In float64, as the Gram matrix of a pipeline where float32 would lose digits.
            rows = torch.stack([gradient.flatten() for gradient in gradients]).double()
            matrix = rows @ rows.transpose(0, 1)
            metrics += [matrix[i, j] for i, j in pairs]
            metrics.append(total.double().square().sum())
        return [loss, total, *metrics]

    graph = fx.Graph()
    tracer = SymbolTracer(graph)
    symbols = {name: tracer.symbol(name) for name in ranks}
    logprobs, leaf = symbols[LOGPROBS], symbols[LOGPROBS].detach()
    sample = list(sample_inputs(ranks).values())
    arguments = [leaf, *list(symbols.values())[1:]]
    loss, gradient, *metrics = append_operations(compute, arguments, sample)
    loss = loss + ((logprobs - leaf) * gradient).sum()
    names = [name for own in keys for name in own.names]
    names += [*products.values(), squared_norm] if tracked else []
    graph.output((loss.node, {n: metric.node for n, metric in zip(names, metrics, strict=True)}))
    _merge_equal_nodes(graph)
    graph.eliminate_dead_code()
    return LossGraph(graph, ranks, keys, products, squared_norm)


def _gradient(term: str, surrogate: Tensor, leaf: Tensor) -> Tensor:
    if not surrogate.requires_grad:
        raise UnsuitableTermError(term, "it does not depend on the log-probs")
    (gradient,) = torch.autograd.grad(surrogate, leaf)
    return gradient


def _keys(index: int, recorded: _RecordedTerm) -> GraphKeys:
    rank, _, *ranks = recorded.ranks
    own = {
        name: (_metric(f"m/{index}.{place}"), ranks[place])
        for place, name in enumerate(recorded.term.functions)
    }
    return GraphKeys(_metric(f"v/{index}"), rank, own)


def _metric(name: str) -> str:
    # By index: the names of terms may hold characters that the server does not take.
    return f"custom/{name}:sum"


def _weighted(factors: Sequence[Tensor], summands: Sequence[Tensor]) -> Tensor:
    first, *rest = (f * summand for f, summand in zip(factors, summands, strict=True))
    return sum(rest, first)


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
