"""Form per datum of a plain function `(data, logprobs)`, found by tracing it.

The function is called with stand-ins for the data and the log-probs of two data. From the
operations that it records follows whether it is a sum over data: up to the last additions, each
depends on the log-probs of one datum alone. Then it is called for real, on random log-probs of the
batch and of each datum by itself, to find by what it divides that sum.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx

from steelyard.clients.one_pass.loss_graph import UnsuitableTermError
from steelyard.clients.one_pass.separability import mixing_operation
from steelyard.clients.one_pass.symbols import Symbol, SymbolTracer
from steelyard.composition import PerDatum, Reduction, Term
from steelyard.gradients import as_tensor, loss_fn_input

Kind: TypeAlias = Literal["sum", "mean over data", "mean over values"]
_TO_HOST = ("item", "tolist", "numpy", "cpu", "__float__")
_PREFIX = "field_"  # a field may be called `logprobs`, as the first argument is
_MAX_FUNCTIONS = 64  # a function that is new at every call must not fill the memory
_MAX_TRACES = 8  # a function whose operations change more often is not uploaded again and again


@dataclass
class _Known:
    """Knowledge about a function: its traces so far, or why it cannot be traced."""

    reason: str | None = None
    # By the operations, the number of data, and whether all data have the same size.
    kinds: dict[tuple[str, int, bool], dict[str, Kind]] = field(default_factory=dict)

    @property
    def traces(self) -> set[str]:
        """Operations of its traces so far."""
        return {code for code, *_ in self.kinds}


class _UndecidedError(ValueError):
    """A batch does not show whether a result is a sum or a mean; another batch may."""


@dataclass(frozen=True)
class _Trace:
    """Operations of a function for two data.

    Attributes:
        code: the operations as text.
        results: the loss under `""`, and the metrics by name; numbers, or nodes.
        graph: the operations.
        fields: names of the fields that it reads.
    """

    code: str
    results: Mapping[str, Any]
    graph: fx.Graph
    fields: Sequence[str]


def hash_key(fn: Any) -> Hashable:
    """Key of a term: the term, by value if it can be; else equal for the same object only."""
    try:
        hash(fn)
    except TypeError:
        return _ByIdentity(fn)
    return fn  # type: ignore[no-any-return]  # hashable


class _ByIdentity:
    def __init__(self, of: Any) -> None:
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self._of is other._of

    def __hash__(self) -> int:
        return id(self._of)


class FunctionTraces:
    """Traces of functions; a function is traced at every step, as its constants may change."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}

    def form_of(
        self, term: Term, data: Sequence[Any], shapes: Sequence[torch.Size]
    ) -> tuple[PerDatum, Hashable]:
        """Form of a function for a batch, and a key: equal keys have equal operations.

        Raises:
            UnsuitableTermError: it cannot be traced, or is no sum over data.
        """
        if len(self._known) > _MAX_FUNCTIONS:
            self._known.clear()
        known = self._known.setdefault(hash_key(term.spec.fn), _Known())
        if known.reason is not None:
            raise UnsuitableTermError(term.name, known.reason)
        call = partial(term.spec.call, **term.spec.options)
        try:
            return self._form_of(known, call, data, shapes)
        except _UndecidedError as error:
            raise UnsuitableTermError(term.name, str(error)) from error
        except Exception as error:  # a function is anyone's
            known.reason = f"it cannot be traced: {' '.join(str(error).split())[:200]}"
            raise UnsuitableTermError(term.name, known.reason) from error

    def _form_of(
        self,
        known: _Known,
        call: Callable[..., Any],
        data: Sequence[Any],
        shapes: Sequence[torch.Size],
    ) -> tuple[PerDatum, Hashable]:
        with _without_randomness():
            trace = _trace(call, data, rank=len(shapes[0]))
        # A function may divide by the number of data. With data of the same size the mean over
        # data is that over values, and which one it is shows at another batch.
        key = (trace.code, len(data), len({shape.numel() for shape in shapes}) == 1)
        if key not in known.kinds:
            if trace.code not in known.traces and len(known.traces) >= _MAX_TRACES:
                raise ValueError("its operations change from step to step")
            _require_sum(trace)
            known.kinds[key] = _find_kinds(call, data, shapes, trace)
        kinds = known.kinds[key]
        # With the kinds: of two functions that divide by 2, one may divide by the number of the
        # data that it was traced with.
        return _form(call, trace, kinds, data, shapes), (trace.code, tuple(kinds.items()))


def _form(
    call: Callable[..., Any],
    trace: _Trace,
    kinds: Mapping[str, Kind],
    data: Sequence[Any],
    shapes: Sequence[torch.Size],
) -> PerDatum:
    values = sum(shape.numel() for shape in shapes)
    reductions: dict[Kind, Reduction] = {
        "sum": "sum",
        "mean over data": "mean",
        "mean over values": values,
    }

    def result(name: str, logprobs: Tensor, **fields: Tensor) -> Tensor:
        """A result for one datum, times its number of values if it is a mean over values."""
        named = {key.removeprefix(_PREFIX): value for key, value in fields.items()}
        returned = call([_Datum(named, frozenset(named))], [logprobs])
        value = _unwrap(name, _split(returned)[name])
        return value * logprobs.numel() if kinds[name] == "mean over values" else value  # type: ignore[no-any-return]

    fixed = [name for name, value in trace.results.items() if not isinstance(value, fx.Node)]
    numbers = _split(call(data, _random(shapes, -1.0))) if fixed else {}
    metrics: dict[str, Any] = {
        name: float(numbers[name])
        if name in fixed
        else (partial(result, name), reductions[kinds[name]])
        for name in trace.results
        if name
    }
    fields = {
        f"{_PREFIX}{name}": [as_tensor(loss_fn_input(d, name)) for d in data]
        for name in trace.fields
    }
    return PerDatum(
        partial(result, ""), fields, reductions[kinds[""]], metrics=metrics, all_tokens=True
    )


def _trace(call: Callable[..., Any], data: Sequence[Any], rank: int) -> _Trace:
    """Call a function with stand-ins for two data.

    Raises:
        Exception: whatever the function or torch.fx raises.
    """
    graph = fx.Graph()
    tracer = SymbolTracer(graph)
    inputs = [set(d.loss_fn_inputs) for d in data]
    everywhere = frozenset.intersection(*map(frozenset, inputs))
    somewhere = frozenset.union(*map(frozenset, inputs)) - everywhere
    logprobs = [tracer.symbol(f"logprobs_{index}_{rank}") for index in range(2)]
    stand_ins = [_Datum(_Placeholders(tracer, index), everywhere, somewhere) for index in range(2)]
    results = {
        name: _unwrap(name, each) for name, each in _split(call(stand_ins, logprobs)).items()
    }
    found = {
        name: each.node if isinstance(each, fx.Proxy) else each for name, each in results.items()
    }
    if not isinstance(found[""], fx.Node):
        raise TypeError("its loss does not depend on the log-probs")
    graph.output(tuple(each for each in found.values() if isinstance(each, fx.Node)))
    graph.eliminate_dead_code()
    fields = sorted({name for datum in stand_ins for name in datum.loss_fn_inputs.read})
    return _Trace(graph.python_code("self").src, found, graph, fields)


@contextlib.contextmanager
def _without_randomness() -> Iterator[None]:
    """Restore the global random generators, whose numbers a trace would make constants.

    Raises:
        ValueError: one was used inside.
    """
    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002 - users' own
    try:
        yield
        after = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
        if str(before[:2]) != str(after[:2]) or not torch.equal(before[2], after[2]):
            raise ValueError("it draws random numbers")
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


def _require_sum(trace: _Trace) -> None:
    for node in trace.graph.nodes:
        if node.op == "call_method" and node.target in _TO_HOST:
            raise ValueError(f"it reads a value with .{node.target}()")
    mixing = mixing_operation(
        trace.graph, [each for each in trace.results.values() if isinstance(each, fx.Node)]
    )
    if mixing is not None:
        raise ValueError(f"it is no sum over data, for its {mixing}")


def _find_kinds(
    call: Callable[..., Any],
    data: Sequence[Any],
    shapes: Sequence[torch.Size],
    trace: _Trace,
) -> dict[str, Kind]:
    """Relation of each result to those of single data, found on random log-probs.

    Raises:
        ValueError: it is neither a sum nor a mean of them.
        _UndecidedError: it could be one or the other, as a result that is 0.
    """
    sizes = torch.tensor([shape.numel() for shape in shapes], dtype=torch.float64)
    weights: dict[Kind, Tensor] = {
        "sum": torch.ones_like(sizes),
        "mean over data": torch.ones_like(sizes) / len(data),
        "mean over values": sizes / sizes.sum(),
    }
    names = [name for name, each in trace.results.items() if isinstance(each, fx.Node)]
    fits = {name: list(weights) for name in names}
    for scale in (-1.0, -8.0):
        logprobs = _random(shapes, scale)
        together = _split(call(data, logprobs))
        pairs = zip(data, logprobs, strict=True)
        alone = [_split(call([datum], [row])) for datum, row in pairs]
        for name in names:
            each = torch.tensor([float(one[name]) for one in alone], dtype=torch.float64)
            whole = float(together[name])
            fits[name] = [kind for kind in fits[name] if _adds_up(weights[kind] * each, whole)]
    for name, kinds in fits.items():
        what = f"the metric {name!r}" if name else "it"
        if not kinds:
            raise ValueError(f"{what} is neither the sum nor the mean of those of single data")
        if any(not torch.equal(weights[kind], weights[kinds[0]]) for kind in kinds):
            raise _UndecidedError(f"{what} could be a sum or a mean over the data of this batch")
    return {name: kinds[0] for name, kinds in fits.items()}


def _adds_up(summands: Tensor, whole: float) -> bool:
    # Relative to the summands: a loss may be scaled by 1e-6, and its summands may cancel.
    return abs(float(summands.sum()) - whole) <= 1e-5 * float(summands.abs().sum())


def _random(shapes: Sequence[torch.Size], scale: float) -> list[Tensor]:
    """Log-probs of another scale for each datum, so that a sum and the means differ."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.rand(shape, generator=generator) * scale * (1 + index / len(shapes)) - 1e-3
        for index, shape in enumerate(shapes)
    ]


def _split(returned: Any) -> dict[str, Any]:
    """Results by name: the loss under `""`, and the metrics."""
    loss, metrics = returned if isinstance(returned, tuple) else (returned, None)
    return {"": loss, **(metrics or {})}


def _unwrap(name: str, result: Any) -> Any:
    """A metric before it was read as a number: it may be `loss.item()`."""
    while (
        name
        and isinstance(result, fx.Proxy)
        and result.node.op == "call_method"
        and result.node.target in ("item", "detach")
    ):
        result = fx.Proxy(result.node.args[0], result.tracer)  # type: ignore[arg-type]  # a node
    return result


class _Field:
    """Stand-in for a field of a datum, as the SDK's `TensorData`."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def to_torch(self) -> Tensor:
        return self._tensor


class _Datum:
    """Stand-in for a datum: it has fields of `loss_fn_inputs` and nothing else."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        everywhere: frozenset[str],
        somewhere: frozenset[str] = frozenset(),
    ) -> None:
        self.loss_fn_inputs = _Fields(tensors, everywhere, somewhere)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it reads {name!r} of a datum, which is not sent as a tensor")


class _Fields(Mapping[str, Any]):
    """Stand-in for `loss_fn_inputs`; it has the fields that all data have."""

    def __init__(
        self, tensors: Mapping[str, Any], everywhere: frozenset[str], somewhere: frozenset[str]
    ) -> None:
        self._tensors, self._everywhere, self._somewhere = tensors, everywhere, somewhere
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name in self._somewhere:
            raise ValueError(f"it reads {name!r}, which only some of the data have")
        if name not in self._everywhere:
            raise KeyError(name)
        self.read.add(name)
        return _Field(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        raise ValueError("it reads all fields of a datum")

    def __len__(self) -> int:
        raise ValueError("it counts the fields of a datum")


class _Placeholders(dict[str, Symbol]):
    """Inputs of a graph for the fields of a datum, made when they are read."""

    def __init__(self, tracer: SymbolTracer, index: int) -> None:
        super().__init__()
        self._tracer, self._index = tracer, index

    def __missing__(self, name: str) -> Symbol:
        graph = self._tracer.graph
        with graph.inserting_before(next(iter(graph.nodes))):
            self[name] = self._tracer.symbol(f"field_{self._index}_{name}")
        return self[name]
