"""Operations of uploaded losses: the allowlist, and how a graph of them is decoded and run."""

from __future__ import annotations

import builtins
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from tinker import types
from torch import Tensor

from steelyard.engine.server.uploaded_loss.budget import MAX_PIECES
from steelyard.errors import InputError

# Both functions of torch and methods of tensors.
_BOTH = """
    abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sigmoid logit tanh sin cos tan atan
    erf neg negative positive reciprocal relu sign floor ceil round trunc frac clamp clip clamp_min
    clamp_max minimum maximum fmin fmax where lerp add sub subtract mul multiply div divide
    true_divide floor_divide remainder fmod pow float_power atan2 hypot xlogy logaddexp logaddexp2
    eq ne lt le gt ge logical_and logical_or logical_not logical_xor isfinite isinf isnan nan_to_num
    isclose sum nansum mean nanmean prod amax amin max min argmax argmin std var norm logsumexp
    softmax log_softmax cumsum cumprod cummax cummin logcumsumexp diff all any count_nonzero median
    quantile sort argsort topk flip roll gather take_along_dim index_select masked_fill dot inner mv
    mm bmm matmul outer reshape flatten unflatten squeeze unsqueeze transpose t permute movedim
    narrow select chunk split unbind tril triu diagonal clone detach numel broadcast_to
"""
_FUNCTIONS = "arange cat stack concat zeros_like ones_like full_like dist cosine_similarity"
_METHODS = """
    view view_as expand expand_as size dim ndimension contiguous type_as float double long int bool
    half bfloat16 to masked_select new_zeros new_ones
"""
_NN_FUNCTIONS = """
    softplus logsigmoid gelu silu elu leaky_relu hardtanh softmin huber_loss smooth_l1_loss mse_loss
    l1_loss kl_div binary_cross_entropy_with_logits cosine_similarity normalize softmax log_softmax
    relu sigmoid tanh pad
"""
_OPERATORS = """
    add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert inv not_
    getitem matmul
"""
_MATH = "sqrt log log2 log10 log1p exp expm1 floor ceil fabs tanh isfinite isnan isinf"


def _by_name(module: Any, names: str) -> dict[str, Callable[..., Any]]:
    """Functions of a module, by the names with which the SDK serializes them: those of torch.fx."""
    functions = [getattr(module, name) for name in names.split()]
    # Functions that torch implements in C++ belong to no module.
    homes = [(fn.__module__ or "torch").replace("_operator", "operator") for fn in functions]
    return {f"{home}.{fn.__name__}": fn for home, fn in zip(homes, functions, strict=True)}


FUNCTIONS = {
    **_by_name(torch, _BOTH + _FUNCTIONS),
    **_by_name(torch.nn.functional, _NN_FUNCTIONS),
    **_by_name(operator, _OPERATORS),
    **_by_name(math, _MATH),
}
METHODS = frozenset((_BOTH + _METHODS).split())
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "device", "T", "mT"})
# Fields of the named tuples that sort, max, min, topk, median and the like return.
RESULT_FIELDS = frozenset({"values", "indices"})
DTYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}


MAX_INT = 2**53  # integers up to here are exact in float64

Values: TypeAlias = dict[str, Any]
# An argument, from the values of the nodes so far and the device.
Argument: TypeAlias = Callable[[Values, str], Any]


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: of its node.
        what: its function, for messages.
        apply: the function, of the arguments by position and by name.
        args: give its arguments.
        kwargs: give its arguments by name.
        freed: nodes whose values no later operation reads.
    """

    name: str
    what: str
    apply: Callable[[list[Any], dict[str, Any]], Any]
    args: Sequence[Argument]
    kwargs: Mapping[str, Argument]
    freed: Sequence[str]


class Program:
    """The operations of a graph.

    Args:
        loss: the name of the loss, for messages.
        nodes: in order; the last one is the output.
    """

    def __init__(self, loss: str, nodes: Sequence[types.CustomLossNode]) -> None:
        self._loss = loss
        self._inputs = [node.name for node in nodes if node.op == "placeholder"]
        last = _last_uses(nodes)
        steps = [node for node in nodes if node.op not in ("placeholder", "output")]
        self._steps = [
            Step(
                node.name,
                node.target,
                _function(node),
                [_argument(arg) for arg in node.args],
                {key: _argument(arg) for key, arg in node.kwargs.items()},
                last[node.name],
            )
            for node in steps
        ]
        outputs = [node for node in nodes if node.op == "output"]
        self._output = _argument(outputs[0].args[0]) if outputs else None

    def run(
        self, inputs: Sequence[Tensor], device: str, check: Callable[[], None] | None = None
    ) -> Any:
        """Output of the graph.

        Args:
            inputs: of the graph, in order.
            device: on which tensors are made.
            check: called before each operation; it raises if there is no time left. None: there
                is enough.

        Raises:
            InputError: an operation fails, or there is no output.
        """
        values: Values = dict(zip(self._inputs, inputs, strict=True))
        for step in self._steps:
            if check is not None:
                check()
            try:
                args = [arg(values, device) for arg in step.args]
                kwargs = {key: arg(values, device) for key, arg in step.kwargs.items()}
                values[step.name] = step.apply(args, kwargs)
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"the loss {self._loss!r} must work for every datum, and {step.name} "
                    f"({step.what}) failed: {' '.join(str(error).split())}"
                ) from error
            # A value that no later node reads is freed, unless the backward pass needs it.
            for name in step.freed:
                values.pop(name, None)
        if self._output is None:
            raise InputError(f"the loss {self._loss!r} must have an output.")
        return self._output(values, device)


def _last_uses(nodes: Sequence[types.CustomLossNode]) -> dict[str, list[str]]:
    """For each node, those that it is the last one to read."""
    left = Counter(_references([[node.args, node.kwargs] for node in nodes]))
    last_read: dict[str, list[str]] = {}
    for node in nodes:
        read = Counter(_references([node.args, node.kwargs]))
        left -= read
        last_read[node.name] = [name for name in read if not left[name]]
    return last_read


def _references(value: Any) -> Iterator[str]:
    """Names of the nodes that an encoded argument refers to."""
    match value:
        case {"ref": str(name)}:
            yield name
        case dict():
            for item in value.values():
                yield from _references(item)
        case list() | tuple():
            for item in value:
                yield from _references(item)


def _argument(arg: Any) -> Argument:
    """Decode an argument; one that refers to no node is decoded once."""
    match arg:
        case {"ref": str(name)}:
            return lambda values, _: values[name]
        case {"device": _}:
            return lambda _, device: torch.device(device)
    if any(True for _ in _references(arg)) or _has_device(arg):
        return lambda values, device: _decode(arg, values, device)
    constant = _decode(arg, {}, "cpu")
    # Functions do not change their arguments, but a list could be one that torch keeps.
    return (lambda *_: list(constant)) if isinstance(constant, list) else (lambda *_: constant)


def _has_device(arg: Any) -> bool:
    if isinstance(arg, dict):
        return "device" in arg or any(_has_device(item) for item in arg.values())
    return isinstance(arg, list) and any(_has_device(item) for item in arg)


def _decode(arg: Any, values: Mapping[str, Any], device: str) -> Any:  # noqa: PLR0911 - one for each form
    match arg:
        case {"ref": name}:
            return values[name]
        case {"tuple": items}:
            return tuple(_decode(item, values, device) for item in items)
        case {"slice": items}:
            return slice(*(_decode(item, values, device) for item in items))
        case {"dict": items}:
            return {key: _decode(item, values, device) for key, item in items.items()}
        case {"ellipsis": _}:
            return ...
        case {"float": text}:
            return float(text)
        case {"dtype": name}:
            return DTYPES[name]
        case {"device": _}:
            return torch.device(device)
        case list():
            return [_decode(item, values, device) for item in arg]
        case _:
            return arg


def _function(node: types.CustomLossNode) -> Callable[[list[Any], dict[str, Any]], Any]:
    if node.target == "getattr":
        return lambda args, _: _read_attribute(node.name, *args)
    if node.op == "call_method":
        method = builtins.getattr(torch.Tensor, node.target)

        def call_method(args: list[Any], kwargs: dict[str, Any]) -> Any:
            if not isinstance(args[0], Tensor):
                raise InputError(f"{node.name} must call a method of a tensor.")
            _check_chunks(node.target, *args, **kwargs)
            return method(*args, **kwargs)

        return call_method
    fn = FUNCTIONS[node.target]
    if fn in (operator.getitem, torch.arange):
        return lambda args, kwargs: fn(*args, **kwargs)
    if node.target.startswith(("math.", "operator.")):
        return lambda args, kwargs: fn(*_numbers_or_tensors(fn, args), **kwargs)

    def call_function(args: list[Any], kwargs: dict[str, Any]) -> Any:
        # In the usual case a tensor stands first.
        is_usual = bool(args) and isinstance(args[0], Tensor)
        if not is_usual and not _has_tensor([args, kwargs]):
            args = _numbers_or_tensors(fn, args)
        _check_chunks(node.target, *args, **kwargs)
        return fn(*args, **kwargs)

    return call_function


def _check_chunks(target: str, /, *args: Any, **kwargs: Any) -> None:
    """Check a number of chunks: torch makes a list of so many sizes before the budget sees it."""
    if target.rpartition(".")[2] != "chunk":
        return
    chunks = kwargs.get("chunks", args[1] if len(args) > 1 else 0)
    if isinstance(chunks, int) and chunks > MAX_PIECES:
        raise InputError(
            f"a custom loss may cut a tensor into at most {MAX_PIECES} pieces, got {chunks}."
        )


def _has_tensor(value: Any) -> bool:
    """Return whether a value holds a tensor; stops at the first, as there may be very many."""
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


def _read_attribute(where: str, value: Any, name: str) -> Any:
    of_tensor = isinstance(value, Tensor) and name in ATTRIBUTES
    of_result = isinstance(value, tuple) and name in RESULT_FIELDS
    if not (of_tensor or of_result):
        raise InputError(f"{where} must read an attribute of a tensor, got {name!r}.")
    return builtins.getattr(value, name)


def _numbers_or_tensors(fn: Any, args: list[Any]) -> list[Any]:
    """Arguments of a function, checked to be tensors and numbers; without a tensor, bounded ones.

    Python's integers, strings and tuples have no size limit: `"ab" * 2**40` fills the memory, and
    so do `"%99999999999s" % tensor` and adding up the pieces of a tensor, `pieces + pieces`, again
    and again. `2**50 ** 2**50` would too; as floats it overflows instead.

    Raises:
        InputError: an argument is neither, or too large.
    """
    tensors = [isinstance(arg, Tensor) for arg in args]
    numbers = [arg for arg, is_tensor in zip(args, tensors, strict=True) if not is_tensor]
    is_bounded = all(isinstance(arg, int | float) for arg in numbers) and (
        any(tensors) or all(abs(arg) <= MAX_INT for arg in numbers)
    )
    if not is_bounded:
        raise InputError("an argument that is no tensor must be a number of at most 2**53.")
    return [float(arg) for arg in args] if fn is operator.pow and not any(tensors) else args
