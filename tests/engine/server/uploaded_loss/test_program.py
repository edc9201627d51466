from __future__ import annotations

from typing import Any

import pytest
import torch

from steelyard.engine.server.uploaded_loss.program import Program
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
