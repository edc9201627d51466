from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from steelyard.engine.server.uploaded_loss.validate import validate_loss
from steelyard.errors import InputError
from tests.engine.data import datum

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
        call("torch.functional.norm", LOGPROBS, 2, 0, False, LOGPROBS),
        call("torch.nn.functional.normalize", LOGPROBS, 2, 0, 1e-12, LOGPROBS),
        call("torch.nn.functional.relu", LOGPROBS, inplace=True),
        call("torch.nn.functional.elu", LOGPROBS, 1.0, True),
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
        (lambda: upload(call("to", LOGPROBS, "cuda", op="call_method")), "on the CPU, got 'cuda'"),
        (lambda: upload(call("torch.zeros_like", LOGPROBS, device="meta")), "the CPU, got 'meta'"),
        (
            lambda: upload(call("operator.getitem", [LOGPROBS, LOGPROBS], {"slice": [None] * 3})),
            "'x' must index the value of an earlier node",
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


def test_the_defaults_of_out_and_inplace_that_the_sdk_records_are_accepted() -> None:
    def loss(logprobs: Any) -> Any:
        unit = F.normalize(logprobs, dim=0) + F.relu(logprobs).to("cpu")
        return unit.sum() + torch.norm(logprobs), {}

    graph = encode_graph(trace_loss(loss, {"logprobs": 1}, "s"))
    assert {"out", "inplace"} <= {key for node in graph.nodes for key in node.kwargs}
    request = upload().model_copy(update={"graph": graph})
    leaf = torch.tensor([-3.0, -4.0], requires_grad=True)
    value, _ = validate_loss(request, 99).bind([datum([1, 2])])([leaf])
    assert value.item() == pytest.approx(5 - 0.6 - 0.8)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (call("torch.roll", LOGPROBS, [0] * 65, [0] * 65), "at most 64 items, got 65"),
        (call("operator.getitem", LOGPROBS, {"tuple": [None] * 65}), "at most 64 items, got 65"),
        (call("reshape", LOGPROBS, *[1] * 65, op="call_method"), "at most 64 items, got 66"),
        (call("torch.sum", LOGPROBS, dim=[[[[[[[[[[0]]]]]]]]]]), "nested at most 8 deep"),
    ],
)
def test_arguments_that_torch_would_handle_one_by_one_are_limited(
    node: dict[str, Any], why: str
) -> None:
    """A roll by 20,000 shifts is as many calls inside of each other, in C++: a crash."""
    with pytest.raises(InputError, match=why):
        validate_loss(upload(node), 99)
