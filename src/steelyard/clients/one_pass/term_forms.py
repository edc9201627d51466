"""Form per datum of each term, or the reason for which it has none.

A server computes an uploaded loss for one datum at a time, so that a term must be a sum over data.
Its form is the function of one datum. A term may declare it (`per_datum`). Of a plain function
`(data, logprobs)` it is found by tracing: the function is called with stand-ins for the data and
the log-probs of two data. From the operations that it records follows whether it is a sum: up
to the last additions, each depends on the log-probs and fields of one datum. Then it is called for
real, on random log-probs of the batch and of each datum by itself, to find by what it divides that
sum.

Each operation depends on no datum, on one, or on both, by their log-probs or by their fields. An
operation may join both only by addition: `+`, `-`, and `sum` or `mean` of tensors that `cat` or
`stack` has put side by side, on which all operations before were elementwise. What follows must be
linear: a product with, or a division by, something that depends on no datum. The sum of the weights
of all data is no such divisor: the values of a datum would depend on the fields of the others.
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
from steelyard.clients.one_pass.torch_operations import Symbol, SymbolTracer
from steelyard.composition.per_datum import PerDatum, Reduction, Separable
from steelyard.composition.terms import Term
from steelyard.gradients.datum_fields import as_tensor, loss_fn_input

# "none": of no datum. "one": of one. "joined": of both, element by element. "added": a sum.
State: TypeAlias = Literal["none", "one", "joined", "added"]
_LINEAR = frozenset({"neg", "double", "float", "to", "type_as", "clone", "contiguous", "detach"})
# Each value of the result depends on the values at the same place alone.
_ELEMENTWISE = """
    abs exp expm1 log log1p sqrt rsqrt square reciprocal sigmoid tanh relu logsigmoid log_sigmoid
    softplus sin cos sign floor ceil round trunc pow add sub mul div minimum maximum logaddexp where
    clamp clip clamp_min clamp_max
    masked_fill expand_as expand broadcast_to zeros_like ones_like full_like
    eq ne lt le gt ge isfinite isnan isinf logical_and logical_or logical_not and_ or_ invert
"""
# Operators and methods with the name of the function that does the same.
_ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "truediv": "div",
    "true_divide": "div",
    "negative": "neg",
    "concat": "cat",
}


def operation_name(node: fx.Node) -> str:
    """Name of an operation, the same for a function of torch, its method and its operator."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return _ALIASES.get(name, name)


def mixing_operation(graph: fx.Graph, results: Sequence[fx.Node]) -> str | None:
    """Name of an operation that mixes data otherwise than by a sum; None if there is none.

    Args:
        graph: its inputs are named `logprobs_0…`, `field_0…`, `logprobs_1…` and `field_1…`.
        results: must be sums over data, each.
    """
    states: dict[fx.Node, State] = {}
    owners: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            states[node], owners[node] = "one", int(str(node.target).split("_")[1])
            continue
        state = _state(node, states, owners)
        if state is None:
            return operation_name(node)
        states[node] = state
        if state == "one":
            owners[node] = next(
                owners[argument] for argument in node.all_input_nodes if argument in owners
            )
    unadded = [node for node in results if states[node] not in ("added", "none")]
    return operation_name(unadded[0]) if unadded else None


def _state(  # noqa: PLR0911 - one for each rule
    node: fx.Node, states: Mapping[fx.Node, State], owners: Mapping[fx.Node, int]
) -> State | None:
    """State of an operation's result; None if it mixes data otherwise than by a sum."""
    given = node.all_input_nodes
    argument_states = {states[argument] for argument in given}
    name = operation_name(node)
    if argument_states <= {"none"}:
        return "none"
    if (
        argument_states <= {"none", "one"}
        and len({owners[argument] for argument in given if argument in owners}) == 1
    ):
        return "one"
    if name in ("add", "sub") and "joined" not in argument_states:
        return "added"  # of two data, or of a sum and another summand
    if name in ("cat", "stack") and argument_states <= {"none", "one"}:
        return "joined"
    if argument_states <= {"none", "joined"}:
        if name in ("sum", "mean") and len(node.args) == 1 and not node.kwargs:
            return "added"
        return "joined" if name in _LINEAR or name in _ELEMENTWISE.split() else None
    if argument_states <= {"none", "added"}:
        return "added" if _is_linear(name, node.args, states) else None
    return None


def _is_linear(name: str, args: Sequence[Any], states: Mapping[fx.Node, State]) -> bool:
    added = [isinstance(arg, fx.Node) and states[arg] == "added" for arg in args]
    if name == "mul":
        return sum(added) == 1
    if name == "div":
        return added[:2] == [True, False]
    # Sums of one value, and the value with another type.
    return name in _LINEAR or (name in ("sum", "mean") and len(args) == 1)


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
        name: _unwrap(name, value) for name, value in _split(call(stand_ins, logprobs)).items()
    }
    traced = {
        name: value.node if isinstance(value, fx.Proxy) else value
        for name, value in results.items()
    }
    if not isinstance(traced[""], fx.Node):
        raise TypeError("its loss does not depend on the log-probs")
    graph.output(tuple(value for value in traced.values() if isinstance(value, fx.Node)))
    graph.eliminate_dead_code()
    fields = sorted({name for datum in stand_ins for name in datum.loss_fn_inputs.read})
    return _Trace(graph.python_code("self").src, traced, graph, fields)


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
        trace.graph, [result for result in trace.results.values() if isinstance(result, fx.Node)]
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
    names = [name for name, result in trace.results.items() if isinstance(result, fx.Node)]
    fits = {name: list(weights) for name in names}
    for scale in (-1.0, -8.0):
        logprobs = _random(shapes, scale)
        together = _split(call(data, logprobs))
        pairs = zip(data, logprobs, strict=True)
        alone = [_split(call([datum], [row])) for datum, row in pairs]
        for name in names:
            values = torch.tensor([float(one[name]) for one in alone], dtype=torch.float64)
            whole = float(together[name])
            fits[name] = [kind for kind in fits[name] if _adds_up(weights[kind] * values, whole)]
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


_PLACES = {"thread": "a thread", "process": "a process", "async": "the event loop", "ray": "Ray"}


class TermForms:
    """Forms of terms, with the traces of functions from step to step."""

    def __init__(self) -> None:
        self._traces = FunctionTraces()

    def form_of(
        self, term: Term, data: Sequence[Any], shapes: Sequence[torch.Size]
    ) -> tuple[PerDatum | None, Hashable]:
        """Form of a term for a batch, and a key: equal keys have equal functions.

        The form is None if the term has nothing to measure in the batch.

        Raises:
            UnsuitableTermError: it has none.
        """
        reason = why_not(term)
        if reason is not None:
            raise UnsuitableTermError(term.name, reason)
        fn = term.spec.fn
        if not isinstance(fn, Separable):
            return self._traces.form_of(term, data, shapes)
        try:
            form = fn.per_datum(data, shapes)
        except Exception as error:  # a term is anyone's; in two passes it raises what it will
            raise UnsuitableTermError(term.name, str(error).rstrip(".")) from error
        if form is None and term.is_base:
            raise UnsuitableTermError(term.name, "it has nothing to measure in this batch")
        if form is None:
            return None, ()
        return form, (_options_key(fn), len(shapes[0]), form.variant)


def _options_key(fn: Any) -> Hashable:
    """Key of a term: with its attributes, if these may be set again between steps."""
    parameters = getattr(fn, "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        return hash_key(fn)
    attributes = getattr(fn, "__dict__", {}).items()
    return hash_key(fn), tuple((name, hash_key(value)) for name, value in attributes)


def _inherits_form(fn: Any) -> bool:
    """Whether a class defines `compute` anew, but not `per_datum`, which then may be another."""
    for cls in type(fn).__mro__:
        if "per_datum" in vars(cls):
            return False
        if "compute" in vars(cls):
            return isinstance(fn, Separable)
    return False


def why_not(term: Term) -> str | None:
    """Reason for which a term cannot be lowered, whatever its formula; None if there is none."""
    spec = term.spec
    separable = isinstance(spec.fn, Separable)
    gradients = ("auto", "autograd", getattr(spec.fn, "gradient", "auto") if separable else "auto")
    reasons = {
        "it has a bound, and its weight depends on this step's value": term.is_bounded,
        f"it reads {', '.join(spec.needs)}": bool(spec.needs),
        f"it runs in {_PLACES.get(spec.run_in)}": spec.run_in not in ("auto", "inline"),
        "it is a coroutine": spec.is_async,
        f"its gradient is {spec.gradient!r}": spec.gradient not in gradients,
        "on_error='skip' needs its value before the gradient": spec.on_error == "skip",
        "it keeps state from step to step": spec.stateful is not None,
        "it takes options at each call": separable and bool(spec.options),
        "its class has a compute of its own, and an inherited per_datum": _inherits_form(spec.fn),
        "it is no sum over data, or has no per_datum": not separable
        and hasattr(spec.fn, "compute"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
