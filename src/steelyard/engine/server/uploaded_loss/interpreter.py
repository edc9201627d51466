"""Uploaded losses: a graph of operations as data, run by looking each one up in a list.

Nothing of what a client sends is ever executed: a name that is not on the list is an error when
the loss is uploaded.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard.engine.server.uploaded_loss.allowlist import ATTRIBUTES, DTYPES, FUNCTIONS, PARTS
from steelyard.engine.trainer import LossOfLogprobs
from steelyard.errors import InputError

_MOST_ELEMENTS = 2**24
LARGEST_INT = 2**53


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
                    metrics[key] = metrics.get(key, 0.0) + metric
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

    def _run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
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

    def _result(self, output: Any) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = output
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss {self.name!r} must be one number, got {shape}.")
        return loss, {key: _number(key, metric) for key, metric in metrics.items()}


def _number(key: str, metric: Any) -> float:
    if isinstance(metric, Tensor) and metric.numel() == 1:
        return float(metric.detach())
    if isinstance(metric, int | float):
        return float(metric)
    raise InputError(f"the metric {key!r} must be one number, got {type(metric).__name__}.")


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
    if not all(isinstance(arg, int | float) and abs(arg) <= LARGEST_INT for arg in args):
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
