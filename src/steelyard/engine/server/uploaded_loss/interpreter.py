"""Interpreter of uploaded losses.

A loss is a graph of operations as data. Each operation is looked up in the allowlist and applied;
no code from a client is executed. `validate` has rejected graphs with other operations when they
were uploaded.
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

from steelyard.engine.server.uploaded_loss.allowlist import (
    ATTRIBUTES,
    DTYPES,
    FUNCTIONS,
    RESULT_FIELDS,
)
from steelyard.engine.trainer import LossOfLogprobs
from steelyard.errors import InputError

_MAX_ELEMENTS = 2**24
MAX_INT = 2**53  # integers up to here are exact in float64


@dataclass(frozen=True)
class TracedLoss:
    """An uploaded loss; its value is that of the SDK's `LossHandle`, in one backward pass.

    The graph computes (loss, metrics) of one datum. The loss of a batch is the sum over its data;
    a metric is summed, and divided by the number of data if its key ends with `:mean`.

    Attributes:
        name: the name of the function.
        inputs: `logprobs`, then the fields that the loss reads, with their ranks.
        nodes: the operations in order; the last one is the output.
    """

    name: str
    inputs: Sequence[types.CustomLossInput]
    nodes: Sequence[types.CustomLossNode]

    def bind(self, data: Sequence[types.Datum]) -> LossOfLogprobs:
        """Loss of a batch as a function of its log-probs, one tensor `[T]` or `[T, K]` per datum.

        Raises:
            InputError: a datum lacks a field, or a field has another rank.
        """
        fields = [self._read_fields(index, datum) for index, datum in enumerate(data)]

        def loss(logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
            total, metrics = torch.zeros(()), dict[str, float]()
            for row, tensors in zip(logprobs, fields, strict=True):
                value, datum_metrics = self._run([row, *tensors])
                total = total + value
                for key, metric in datum_metrics.items():
                    metrics[key] = metrics.get(key, 0.0) + metric
            if not (total.requires_grad and bool(torch.isfinite(total))):
                raise InputError(
                    f"the loss {self.name!r} must be finite and come from the log-probs, "
                    f"got {total.item()}."
                )
            count = len(fields)
            return total, {k: v / count if k.endswith(":mean") else v for k, v in metrics.items()}

        return loss

    def _read_fields(self, index: int, datum: types.Datum) -> list[Tensor]:
        logprobs, *others = self.inputs
        tensors = []
        # The log-probs have the shape of target_tokens, which is checked in their place.
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
            tensors.append(tensor)
        return tensors[1:]

    def _run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        remaining = iter(inputs)
        values: dict[str, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                values[node.name] = next(remaining)
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
        return loss, {key: _to_float(key, metric) for key, metric in metrics.items()}


def _to_float(key: str, metric: Any) -> float:
    if isinstance(metric, Tensor) and metric.numel() == 1:
        return float(metric.detach())
    if isinstance(metric, int | float):
        return float(metric)
    raise InputError(f"the metric {key!r} must be one number, got {type(metric).__name__}.")


def _decode(arg: Any, values: Mapping[str, Any]) -> Any:  # noqa: PLR0911 - one for each form
    match arg:
        case {"ref": name}:
            return values[name]
        case {"tuple": items}:
            return tuple(_decode(each, values) for each in items)
        case {"slice": items}:
            return slice(*(_decode(each, values) for each in items))
        case {"dict": items}:
            return {key: _decode(each, values) for key, each in items.items()}
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
        return _read_attribute(node.name, *args)
    if node.op == "call_method":
        if not isinstance(args[0], Tensor):
            raise InputError(f"{node.name} must call a method of a tensor.")
        fn = builtins.getattr(torch.Tensor, node.target)
    else:
        fn = FUNCTIONS[node.target]
    if not _find_tensors([args, kwargs]):
        return _apply_to_numbers(fn, args, kwargs)
    _check_size(fn, args, kwargs)
    return fn(*args, **kwargs)


def _read_attribute(where: str, value: Any, name: str) -> Any:
    of_tensor = isinstance(value, Tensor) and name in ATTRIBUTES
    of_result = isinstance(value, tuple) and name in RESULT_FIELDS
    if not (of_tensor or of_result):
        raise InputError(f"{where} must read an attribute of a tensor, got {name!r}.")
    return builtins.getattr(value, name)


def _apply_to_numbers(fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Apply a function to plain numbers, which are sizes as a rule.

    Python's integers, strings and tuples have no size limit, so only bounded numbers are allowed:
    `"ab" * 2**40` fills the memory. `2**50 ** 2**50` would too; as floats it overflows instead.
    """
    if fn is operator.getitem or fn is torch.arange:
        _check_size(fn, args, kwargs)
        return fn(*args, **kwargs)
    if not all(isinstance(arg, int | float) and abs(arg) <= MAX_INT for arg in args):
        raise InputError("an argument that is no tensor must be a number of at most 2**53.")
    if fn is operator.pow:
        args = [float(arg) for arg in args]
    return fn(*args, **kwargs)


def _check_size(fn: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Raise before the function runs if its result would be too large.

    The function is first run on the device `meta`, whose tensors have shapes but no storage.
    """
    options = {**kwargs, "device": "meta"} if fn is torch.arange else _to_meta(kwargs)
    try:
        result = fn(*_to_meta(args), **options)
    except NotImplementedError:
        # The shape depends on values (masked_select, x[mask]), so it is not known before the run.
        return
    for tensor in _find_tensors(result):
        if tensor.numel() > _MAX_ELEMENTS:
            raise InputError(
                f"a tensor in a custom loss must have at most {_MAX_ELEMENTS} elements, "
                f"got the shape {list(tensor.shape)}."
            )


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta", requires_grad=False)
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, dict):
        return {key: _to_meta(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_to_meta(each) for each in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_to_meta(each) for each in value)
    return value


def _find_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for each in value.values() for t in _find_tensors(each)]
    if isinstance(value, list | tuple):
        return [t for each in value for t in _find_tensors(each)]
    return []
