"""Graphs of uploaded losses, as the SDK writes them and as it would not."""

from __future__ import annotations

from typing import Any

from tinker import types


def upload(
    *nodes: dict[str, Any], inputs: Any = None, output: Any = None
) -> types.CreateCustomLossRequest:
    """Request that uploads a graph of `nodes`; the loss is the last of them."""
    first = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    value = {"ref": nodes[-1]["name"] if nodes else "logprobs"}
    result = output or {"tuple": [value, {"dict": {}}]}
    last = {"op": "output", "name": "output", "target": "output", "args": [result]}
    return types.CreateCustomLossRequest.model_validate(
        {
            "session_id": "s",
            "custom_loss_seq_id": 0,
            "name": "loss",
            "inputs": inputs or [{"name": "logprobs", "rank": 1}],
            "graph": {"nodes": [first, *nodes, last]},
        }
    )


def call(
    target: str, *args: Any, op: str = "call_function", name: str = "x", **kwargs: Any
) -> dict[str, Any]:
    """Node of a graph."""
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


LOGPROBS, X = {"ref": "logprobs"}, {"ref": "x"}
SUM = call("torch.sum", LOGPROBS)
