from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinker import types

from steelyard.engine.server.uploaded_loss.validate import validate_loss
from steelyard.errors import InputError

from .graphs import LOGPROBS, call, upload


@pytest.mark.parametrize(
    "node",
    [
        call("eval", "1"),
        call("exec", "1"),
        call("open", "/etc/passwd"),
        call("builtins.eval", "1"),
        call("os.system", "true"),
        call("torch.load", "file"),
        call("torch.save", LOGPROBS, "file"),
        call("torch.hub.load", "a", "b"),
        call("torch.ops.load_library", "x"),
        call("torch.utils.cpp_extension.load", "x"),
        call("torch.empty", 10),
        call("operator.attrgetter", "x"),
        call("operator.methodcaller", "x"),
        call("operator.setitem", LOGPROBS, 0, 1),
        call("operator.iadd", LOGPROBS, 1),
        call("operator.lshift", 1, 1000000),
        call("getattr", LOGPROBS, "__class__"),
        call("getattr", LOGPROBS, "grad_fn"),
        call("getattr", LOGPROBS, "data"),
        call("getattr", LOGPROBS),
        call("backward", LOGPROBS, op="call_method"),
        call("item", LOGPROBS, op="call_method"),
        call("numpy", LOGPROBS, op="call_method"),
        call("add_", LOGPROBS, 1, op="call_method"),
        call("__reduce__", LOGPROBS, op="call_method"),
        call("register_hook", LOGPROBS, op="call_method"),
        call("apply_", LOGPROBS, op="call_method"),
        call("sum", op="call_method"),
        call("Linear", LOGPROBS, op="call_module"),
        call("weight", op="get_attr"),
        call("torch.exp", LOGPROBS, out=LOGPROBS),
    ],
    ids=lambda node: f"{node['op']} {node['target']}",
)
def test_an_operation_outside_the_allowlist_is_rejected(node: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"not on the allowlist|not allowed to write"):
        validate_loss(upload(node), 99)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (lambda: upload(call("torch.exp", {"ref": "later"})), "must use nodes before it"),
        (lambda: upload(call("torch.exp", {"pickle": "x"})), "one that the SDK writes"),
        (lambda: upload(call("torch.exp", {"ref": "logprobs", "more": 1})), "the SDK writes"),
        (lambda: upload(call("torch.sum", LOGPROBS, dtype={"dtype": "qint8"})), "the SDK writes"),
        (
            lambda: upload(call("operator.getitem", LOGPROBS, {"slice": [1, 2]})),
            "three parts, got 2",
        ),
        (lambda: upload(call("torch.mul", LOGPROBS, 10**40)), "at most 2\\*\\*53"),
        (
            lambda: upload(call("torch.exp", LOGPROBS, name="logprobs")),
            "unique, got 'logprobs' twice",
        ),
        (
            lambda: upload(call("torch.sum", LOGPROBS), output=LOGPROBS),
            "must be \\(loss, metrics\\)",
        ),
        (
            lambda: upload(
                call("torch.sum", LOGPROBS),
                output={"tuple": [{"ref": "x"}, {"dict": {"loss:sum": {"ref": "x"}}}]},
            ),
            "named custom/<name>:sum",
        ),
        (
            lambda: upload(
                call("torch.sum", LOGPROBS),
                output={"tuple": [{"ref": "x"}, {"dict": {"custom/a:b:sum": {"ref": "x"}}}]},
            ),
            "named custom/<name>:sum",
        ),
        (lambda: upload(inputs=[{"name": "other", "rank": 1}]), "inputs must be those"),
        (lambda: upload(inputs=[{"name": "logprobs", "rank": 0}]), "rank 1 or 2 first"),
        (
            lambda: upload(*[call("torch.exp", LOGPROBS, name=f"n{i}") for i in range(99)]),
            "1 to 99",
        ),
    ],
)
def test_a_malformed_graph_is_rejected(
    request_: Callable[[], types.CreateCustomLossRequest], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        validate_loss(request_(), 99)


def test_the_output_is_the_last_node_and_the_only_one() -> None:
    request = upload(call("torch.sum", LOGPROBS))
    for nodes in (request.graph.nodes[:-1], [*request.graph.nodes, request.graph.nodes[-1]], []):
        graph = request.graph.model_copy(update={"nodes": nodes})
        with pytest.raises(InputError):
            validate_loss(request.model_copy(update={"graph": graph}), 99)
