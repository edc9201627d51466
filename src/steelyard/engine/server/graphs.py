"""Uploaded losses: a graph of operations as data, run by looking each one up in a list.

Nothing of what a client sends is ever executed: a name that is not on the list is an error when
the loss is uploaded.
"""

from __future__ import annotations

import builtins
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard.engine.server.operations import ATTRIBUTES, DTYPES, FUNCTIONS, METHODS, PARTS
from steelyard.engine.trainer import LossOfLogprobs
from steelyard.errors import InputError

# The custom/ keeps them apart from the engine's own; the SDK splits a key at its one colon.
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MOST_ELEMENTS = 2**24
_LARGEST_INT = 2**53
_PARTS = 2


@dataclass(frozen=True)
class TracedLoss:
    """A loss that a client has uploaded: the same as a `LossHandle` run by the SDK, in one pass.

    Attributes:
        name: the function's.
        inputs: `logprobs`, then the fields it reads, with their ranks.
        nodes: what it does, in order; the last one says what it gives.
    """

    name: str
    inputs: Sequence[types.CustomLossInput]
    nodes: Sequence[types.CustomLossNode]

    def of(self, data: Sequence[types.Datum]) -> LossOfLogprobs:
        """The loss of these data, as a function of their log-probs.

        Raises:
            InputError: a datum lacks a field, or one has another rank.
        """
        fields = [self._fields(index, datum) for index, datum in enumerate(data)]

        def loss(logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
            total, metrics = torch.zeros(()), dict[str, float]()
            for row, given in zip(logprobs, fields, strict=True):
                value, found = self._run([row, *given])
                total = total + value
                for key, metric in found.items():
                    metrics[key] = metrics.get(key, 0.0) + float(metric)
            if not (total.requires_grad and bool(torch.isfinite(total))):
                raise InputError(
                    f"the loss {self.name!r} must be finite and come from the log-probs, "
                    f"got {total.item()}."
                )
            count = len(fields)
            return total, {k: v / count if k.endswith(":mean") else v for k, v in metrics.items()}

        return loss

    def _fields(self, index: int, datum: types.Datum) -> list[Tensor]:
        logprobs, *others = self.inputs
        found = []
        for name, rank in [("target_tokens", logprobs.rank), *((i.name, i.rank) for i in others)]:
            data = datum.loss_fn_inputs.get(name)
            if data is None:
                raise InputError(
                    f"data[{index}].loss_fn_inputs must hold {name!r}, which the loss "
                    f"{self.name!r} reads, got {sorted(datum.loss_fn_inputs)}."
                )
            try:
                tensor = data.to_torch()
            except (AssertionError, RuntimeError) as error:
                raise InputError(
                    f"data[{index}].loss_fn_inputs[{name!r}] must be a whole tensor: {error}"
                ) from error
            if rank == 0 and tensor.numel() == 1:
                tensor = tensor.reshape(())
            if tensor.dim() != rank:
                raise InputError(
                    f"data[{index}].loss_fn_inputs[{name!r}] must have the rank {rank}, as the "
                    f"loss {self.name!r} declares it, got {tensor.dim()}."
                )
            found.append(tensor)
        return found[1:]

    def _run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
        given = iter(inputs)
        values: dict[str, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                values[node.name] = next(given)
                continue
            args = [_decode(arg, values) for arg in node.args]
            if node.op == "output":
                return self._result(args[0])
            kwargs = {key: _decode(arg, values) for key, arg in node.kwargs.items()}
            try:
                values[node.name] = _apply(node, args, kwargs)
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"the loss {self.name!r} must work for every datum, and {node.name} "
                    f"({node.target}) failed: {' '.join(str(error).split())}"
                ) from error
        raise InputError(f"the loss {self.name!r} must have an output.")

    def _result(self, output: Any) -> tuple[Tensor, Mapping[str, Any]]:
        loss, metrics = output
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss {self.name!r} must be one number, got {shape}.")
        for key, metric in metrics.items():
            if isinstance(metric, Tensor) and metric.numel() != 1:
                raise InputError(f"the metric {key!r} must be one number, got {metric.shape}.")
        return loss, {
            key: metric.detach().item() if isinstance(metric, Tensor) else metric
            for key, metric in metrics.items()
        }


def read_loss(request: types.CreateCustomLossRequest, max_nodes: int) -> TracedLoss:
    """An uploaded loss, checked node by node.

    Raises:
        InputError: it does something that is not on the list, or does not hold together.
    """
    nodes = request.graph.nodes
    if not 0 < len(nodes) <= max_nodes:
        raise InputError(f"graph.nodes must hold 1 to {max_nodes} nodes, got {len(nodes)}.")
    names = [given.name for given in request.inputs]
    taken = [node.target for node in nodes if node.op == "placeholder"]
    if taken != names or names[:1] != ["logprobs"] or not request.inputs[0].rank:
        raise InputError(
            f"inputs must be those of the graph, {taken}, with 'logprobs' of rank 1 or 2 first, "
            f"got {names}."
        )
    known: set[str] = set()
    for position, node in enumerate(nodes):
        _check_node(node, known, last=position == len(nodes) - 1)
        known.add(node.name)
    _check_output(nodes[-1])
    return TracedLoss(request.name, tuple(request.inputs), tuple(nodes))


def _check_node(node: types.CustomLossNode, known: set[str], *, last: bool) -> None:
    if (node.op == "output") is not last:
        raise InputError("graph.nodes must end with the one output, and it does not.")
    if node.name in known:
        raise InputError(f"the name of a node must be unique, got {node.name!r} twice.")
    if not _allowed(node):
        raise InputError(
            f"a custom loss may use torch's elementwise, reducing and indexing operations, "
            f"got {node.op} {node.target!r} in {node.name!r}, which is not on the list."
        )
    if "out" in node.kwargs:
        raise InputError(f"a custom loss may not write into tensors, got out= in {node.name!r}.")
    for arg in [*node.args, *node.kwargs.values()]:
        _check_arg(arg, known, node.name)


def _allowed(node: types.CustomLossNode) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_function" and node.target == "getattr":
        return len(node.args) == _PARTS and _one_of(node.args[1], ATTRIBUTES | PARTS)
    if node.op == "call_function":
        return node.target in FUNCTIONS
    return node.op == "call_method" and node.target in METHODS and bool(node.args)


def _check_output(node: types.CustomLossNode) -> None:
    match node.args:
        case [{"tuple": [{"ref": str()}, {"dict": dict() as metrics}]}]:
            odd = [key for key in metrics if not _METRIC.fullmatch(str(key))]
            if odd:
                raise InputError(
                    f"a metric must be named custom/<name>:sum or custom/<name>:mean in lower "
                    f"case, got {odd[0]!r}."
                )
        case _:
            raise InputError("the output of a custom loss must be (loss, metrics).")


def _check_arg(arg: Any, known: set[str], where: str) -> None:  # noqa: C901, PLR0912 - one case for each form
    match arg:
        case None | bool() | float() | str():
            pass
        case int():
            if abs(arg) > _LARGEST_INT:
                raise InputError(f"a whole number in {where!r} must be at most 2**53, got {arg}.")
        case list():
            for each in arg:
                _check_arg(each, known, where)
        case {"ref": str(name), **rest} if not rest:
            if name not in known:
                raise InputError(f"{where!r} must use nodes before it, got {name!r}.")
        case {"tuple": list(held), **rest} | {"slice": list(held), **rest} if not rest:
            if "slice" in arg and len(held) != 3:  # noqa: PLR2004 - start, stop, step
                raise InputError(f"a slice in {where!r} must have three parts, got {len(held)}.")
            for each in held:
                _check_arg(each, known, where)
        case {"dict": dict(held), **rest} if not rest:
            for each in held.values():
                _check_arg(each, known, where)
        case {"ellipsis": True, **rest} if not rest:
            pass
        case {"float": "inf" | "-inf" | "nan", **rest} if not rest:
            pass
        case {"dtype": str(name), **rest} if not rest and name in DTYPES:
            pass
        case {"device": "cpu", **rest} if not rest:
            pass
        case _:
            raise InputError(f"an argument of {where!r} must be one that the SDK writes.")


def _decode(arg: Any, values: Mapping[str, Any]) -> Any:  # noqa: PLR0911 - as above
    match arg:
        case {"ref": name}:
            return values[name]
        case {"tuple": held}:
            return tuple(_decode(each, values) for each in held)
        case {"slice": held}:
            return slice(*(_decode(each, values) for each in held))
        case {"dict": held}:
            return {key: _decode(each, values) for key, each in held.items()}
        case {"ellipsis": _}:
            return ...
        case {"float": text}:
            return float(text)
        case {"dtype": name}:
            return DTYPES[name]
        case {"device": name}:
            return torch.device(name)
        case list():
            return [_decode(each, values) for each in arg]
        case _:
            return arg


def _apply(node: types.CustomLossNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if node.target == "getattr":
        return _attribute(node.name, *args)
    if node.op == "call_method":
        if not isinstance(args[0], Tensor):
            raise InputError(f"{node.name} must call a method of a tensor.")
        fn = builtins.getattr(torch.Tensor, node.target)
    else:
        fn = FUNCTIONS[node.target]
    if not _tensors([args, kwargs]):
        return _plain(fn, args, kwargs)
    _check_size(fn, args, kwargs)
    return fn(*args, **kwargs)


def _attribute(where: str, thing: Any, name: str) -> Any:
    of_tensor = isinstance(thing, Tensor) and name in ATTRIBUTES
    # What sort, max and topk give: a tuple whose parts have names.
    of_result = isinstance(thing, tuple) and name in PARTS
    if not (of_tensor or of_result):
        raise InputError(f"{where} must read an attribute of a tensor, got {name!r}.")
    return builtins.getattr(thing, name)


def _plain(fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A function of plain numbers: of sizes, as a rule. Nothing that could grow without end."""
    if fn is operator.getitem or fn is torch.arange:
        _check_size(fn, args, kwargs)
        return fn(*args, **kwargs)
    if not all(isinstance(arg, int | float) and abs(arg) <= _LARGEST_INT for arg in args):
        raise InputError("what is no tensor must be a number of at most 2**53.")
    if fn is operator.pow:
        args = [float(arg) for arg in args]
    return fn(*args, **kwargs)


def _check_size(fn: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Fail, before anything is made, if the result would be too large.

    Tensors on the device `meta` have shapes and no numbers.
    """
    options = {**kwargs, "device": "meta"} if fn is torch.arange else _shadow(kwargs)
    try:
        made = fn(*_shadow(args), **options)
    except NotImplementedError:  # its size depends on the numbers; it is no larger than they are
        return
    for tensor in _tensors(made):
        if tensor.numel() > _MOST_ELEMENTS:
            raise InputError(
                f"a tensor in a custom loss must have at most {_MOST_ELEMENTS} elements, "
                f"got the shape {list(tensor.shape)}."
            )


def _shadow(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta", requires_grad=False)
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, dict):
        return {key: _shadow(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shadow(each) for each in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_shadow(each) for each in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for each in value.values() for t in _tensors(each)]
    if isinstance(value, list | tuple):
        return [t for each in value for t in _tensors(each)]
    return []


def _one_of(value: Any, allowed: frozenset[str]) -> bool:
    return isinstance(value, str) and value in allowed
