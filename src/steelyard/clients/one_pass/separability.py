"""Whether a traced function of two data is a sum over data.

Each operation depends on no datum, on one, or on both, by their log-probs or by their fields. An
operation may join both only by addition: `+`, `-`, and `sum` or `mean` of tensors that `cat` or
`stack` has put side by side, on which all operations before were elementwise. What follows must be
linear: a product with, or a division by, something that depends on no datum. The sum of the weights
of all data is no such divisor: the values of a datum would depend on the fields of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import fx

from steelyard.clients.one_pass.derivatives import CONSTANT, ELEMENTWISE, operation_name

# "none": of no datum. "one": of one. "joined": of both, element by element. "added": a sum.
State: TypeAlias = Literal["none", "one", "joined", "added"]
_LINEAR = frozenset({"neg", "double", "float", "to", "type_as", "clone", "contiguous", "detach"})


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
            owners[node] = next(owners[each] for each in node.all_input_nodes if each in owners)
    unadded = [node for node in results if states[node] not in ("added", "none")]
    return operation_name(unadded[0]) if unadded else None


def _state(  # noqa: PLR0911 - one for each rule
    node: fx.Node, states: Mapping[fx.Node, State], owners: Mapping[fx.Node, int]
) -> State | None:
    """State of an operation's result; None if it mixes data otherwise than by a sum."""
    given = node.all_input_nodes
    found = {states[each] for each in given}
    name = operation_name(node)
    if found <= {"none"}:
        return "none"
    if found <= {"none", "one"} and len({owners[each] for each in given if each in owners}) == 1:
        return "one"
    if name in ("add", "sub") and "joined" not in found:
        return "added"  # of two data, or of a sum and another summand
    if name in ("cat", "stack") and found <= {"none", "one"}:
        return "joined"
    if found <= {"none", "joined"}:
        if name in ("sum", "mean") and len(node.args) == 1 and not node.kwargs:
            return "added"
        return "joined" if name in ELEMENTWISE or name in CONSTANT else None
    if found <= {"none", "added"}:
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
