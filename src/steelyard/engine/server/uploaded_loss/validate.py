"""Validation of an uploaded loss, node by node, before it is stored."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from typing import Any

from tinker import types

from steelyard.engine.server.uploaded_loss.interpreter import TracedLoss
from steelyard.engine.server.uploaded_loss.operations import (
    ATTRIBUTES,
    DTYPES,
    FUNCTIONS,
    MAX_INT,
    METHODS,
    RESULT_FIELDS,
)
from steelyard.errors import InputError

# The prefix custom/ separates them from the engine's metrics. The SDK splits a key at its colon
# into the name and the reduction, so there is exactly one.
_METRIC_KEY = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_MAX_ITEMS, _MAX_DEPTH = 64, 8  # of a list or tuple among the arguments of a node
_GETATTR_ARGS = 2  # the tensor, and the name of the attribute


def validate_loss(request: types.CreateCustomLossRequest, max_nodes: int) -> TracedLoss:
    """Validate an uploaded loss.

    The graph must hold only operations of the allowlist, each of whose arguments is a constant or
    an earlier node, and end with its one output.

    Raises:
        InputError: an operation is not on the allowlist, or the graph is malformed.
    """
    nodes = request.graph.nodes
    if not 0 < len(nodes) <= max_nodes:
        raise InputError(f"graph.nodes must hold 1 to {max_nodes} nodes, got {len(nodes)}.")
    names = [field.name for field in request.inputs]
    placeholders = [node.target for node in nodes if node.op == "placeholder"]
    if placeholders != names or names[:1] != ["logprobs"] or not request.inputs[0].rank:
        raise InputError(
            f"inputs must be those of the graph, {placeholders}, with 'logprobs' of rank 1 or 2 "
            f"first, got {names}."
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
    if not _is_allowed(node):
        raise InputError(
            f"a custom loss may use torch's elementwise, reducing and indexing operations, "
            f"got {node.op} {node.target!r} in {node.name!r}, which is not on the allowlist."
        )
    for name in ("out", "inplace"):
        # torch.fx records the defaults, None and False, too.
        if _given(node, name) not in (None, False):
            raise InputError(
                f"a custom loss is not allowed to write into tensors, got {name}= in {node.name!r}."
            )
    _check_device(node)
    if node.target == "operator.getitem" and not _is_reference(node.args[:1]):
        # Slices of lists of earlier lists would double their contents with each node.
        raise InputError(f"{node.name!r} must index the value of an earlier node.")
    for arg in [*_limited(node.args, node.name), *node.kwargs.values()]:
        _check_arg(arg, known, node.name)


def _is_allowed(node: types.CustomLossNode) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "call_function" and node.target == "getattr":
        return len(node.args) == _GETATTR_ARGS and _is_one_of(
            node.args[1], ATTRIBUTES | RESULT_FIELDS
        )
    if node.op == "call_function":
        return node.target in FUNCTIONS
    return node.op == "call_method" and node.target in METHODS and bool(node.args)


def _given(node: types.CustomLossNode, name: str) -> Any:
    """Argument of a function by its name, wherever it stands; None if it is not given."""
    fn = FUNCTIONS.get(node.target)
    # Functions of C take these by name alone.
    names = [*inspect.signature(fn).parameters] if inspect.isfunction(fn) else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name)


def _check_device(node: types.CustomLossNode) -> None:
    devices = [node.kwargs.get("device"), *(node.args[1:] if node.target == "to" else ())]
    for device in devices:
        if isinstance(device, str) and device != "cpu":
            raise InputError(f"a custom loss runs on the CPU, got {device!r} in {node.name!r}.")


def _check_output(node: types.CustomLossNode) -> None:
    match node.args:
        case [{"tuple": [{"ref": str()}, {"dict": dict() as metrics}]}]:
            invalid = [key for key in metrics if not _METRIC_KEY.fullmatch(str(key))]
            if invalid:
                raise InputError(
                    f"a metric must be named custom/<name>:sum or custom/<name>:mean in lower "
                    f"case, got {invalid[0]!r}."
                )
        case _:
            raise InputError("the output of a custom loss must be (loss, metrics).")


def _check_arg(arg: Any, known: set[str], where: str, depth: int = 0) -> None:
    """Check an argument and what is in it.

    Torch may handle the items of a list by recursion in C++, and `x[None, None, ...]` makes a
    tensor for each: their number and their nesting are limited.
    """
    if depth > _MAX_DEPTH:
        raise InputError(
            f"an argument of {where!r} must be nested at most {_MAX_DEPTH} deep, got more."
        )
    for item in _items(arg, known, where):
        _check_arg(item, known, where, depth + 1)


def _items(arg: Any, known: set[str], where: str) -> Collection[Any]:  # noqa: C901, PLR0912 - one case for each form
    """Items of an argument, which must be of one of the forms that the SDK writes."""
    items: Collection[Any] = ()
    match arg:
        case None | bool() | float() | str():
            pass
        case int():
            if abs(arg) > MAX_INT:
                raise InputError(f"a whole number in {where!r} must be at most 2**53, got {arg}.")
        case list():
            items = _limited(arg, where)
        case {"ref": str(name), **rest} if not rest:
            if name not in known:
                raise InputError(f"{where!r} must use nodes before it, got {name!r}.")
        case {"tuple": list(content), **rest} | {"slice": list(content), **rest} if not rest:
            if "slice" in arg and len(content) != 3:  # noqa: PLR2004 - start, stop, step
                raise InputError(f"a slice in {where!r} must have three parts, got {len(content)}.")
            items = _limited(content, where)
        case {"dict": dict(content), **rest} if not rest:
            items = content.values()  # metrics: each is a value of an earlier node
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
    return items


def _limited(items: list[Any], where: str) -> list[Any]:
    if len(items) > _MAX_ITEMS:
        raise InputError(
            f"a list or tuple in {where!r} must have at most {_MAX_ITEMS} items, got {len(items)}."
        )
    return items


def _is_reference(args: list[Any]) -> bool:
    match args:
        case [{"ref": str()}]:
            return True
    return False


def _is_one_of(value: Any, allowed: frozenset[str]) -> bool:
    return isinstance(value, str) and value in allowed
