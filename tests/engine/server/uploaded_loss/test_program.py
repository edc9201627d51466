from __future__ import annotations

from typing import Any

import pytest
import torch

from steelyard.engine.server.uploaded_loss.operations import Program
from steelyard.errors import InputError

from .graphs import LOGPROBS, X, call, upload

ROW = torch.tensor([-1.0, -2.0])


def program(*nodes: dict[str, Any]) -> Program:
    return Program("loss", upload(*nodes).graph.nodes)


def no_check() -> None:
    pass


def test_operations_run_in_order() -> None:
    found = program(call("torch.exp", LOGPROBS), call("sum", X, op="call_method", name="y")).run(
        [ROW], "cpu", no_check
    )
    assert found[0].item() == pytest.approx(ROW.exp().sum().item())


def test_constants_are_decoded_once_and_devices_at_each_run() -> None:
    made = call(
        "new_zeros",
        LOGPROBS,
        {"tuple": [3]},
        op="call_method",
        device={"device": "cpu"},
        dtype={"dtype": "float64"},
    )
    both = program(made)
    assert both.run([ROW], "cpu", no_check)[0].dtype == torch.float64
    assert both.run([ROW.to("meta")], "meta", no_check)[0].device.type == "meta"


def test_the_time_is_checked_before_each_operation() -> None:
    checks: list[int] = []
    steps = program(call("torch.exp", LOGPROBS), call("torch.sum", X, name="y"))
    steps.run([ROW], "cpu", lambda: checks.append(1))
    assert len(checks) == 2


def test_a_failure_names_the_operation() -> None:
    with pytest.raises(InputError, match=r"'loss' must work for every datum, and x \(torch.dot\)"):
        program(call("torch.dot", LOGPROBS, 3)).run([ROW], "cpu", no_check)
    with pytest.raises(InputError, match="x must call a method of a tensor"):
        program(call("sum", 3, op="call_method")).run([ROW], "cpu", no_check)
    with pytest.raises(InputError, match="the loss 'loss' must have an output"):
        Program("loss", upload().graph.nodes[:-1]).run([ROW], "cpu", no_check)


PIECES = call("torch.unbind", LOGPROBS, name="p")
COUNT = call("torch.count_nonzero", LOGPROBS, name="n")


@pytest.mark.parametrize(
    "nodes",
    [
        # A string of as many copies as the tensor says, and one as wide as the format says.
        [COUNT, call("operator.mul", "ab", {"ref": "n"})],
        [COUNT, call("operator.mul", {"tuple": [1, 2]}, {"ref": "n"})],
        [call("operator.mod", "%9s", LOGPROBS)],
        # Tuples of tensors that grow with each operation.
        [PIECES, call("operator.add", {"ref": "p"}, {"ref": "p"})],
        [PIECES, call("operator.mul", {"ref": "p"}, 2)],
        [call("operator.or_", {"dict": {"a": LOGPROBS}}, {"dict": {"b": LOGPROBS}})],
    ],
)
def test_python_makes_no_strings_and_containers_of_tensors(nodes: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="that is no tensor must be a number"):
        program(*nodes).run([ROW], "cpu", no_check)


def test_numbers_beside_a_tensor_may_be_of_any_size() -> None:
    nodes = [
        call("operator.mul", LOGPROBS, 1e30),
        call("operator.lt", X, {"float": "inf"}, name="y"),
        call("operator.pow", 2, LOGPROBS, name="z"),
    ]
    torch.testing.assert_close(program(*nodes).run([ROW], "cpu", no_check)[0], 2**ROW)


def test_a_value_of_very_many_tensors_is_not_searched_to_its_end() -> None:
    """2**40 references to one tensor, as many as forty nodes could nest."""
    nested: Any = ROW
    for _ in range(40):
        nested = [nested, nested]
    with pytest.raises(InputError, match=r"x \(torch.stack\) failed"):
        program(call("torch.stack", LOGPROBS)).run([nested], "cpu", no_check)
