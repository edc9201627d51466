"""Calls of a loss that go together, and come to the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steelyard.penalties import from_logits as f
from steelyard.penalties.from_logits import LogitCall, fusable
from tests.penalties.from_logits.cases import inputs

MASK = torch.tensor([True, False, True, True])
CALLS = [
    LogitCall("ce", f.cross_entropy, ("z", "t"), 1.0, {"mask": MASK}),
    LogitCall("spread", f.entropy, ("z",), -0.1, {"mask": MASK, "temperature": 2.0}),
    LogitCall("drift", f.kl, ("z", "r"), 0.3, {"mask": MASK, "direction": "reverse"}),
]


def group(*calls: LogitCall) -> list[tuple[str, ...]]:
    return [each.names for each in fusable(calls)]


def test_the_numbers_are_those_of_the_calls() -> None:
    z, r, t = inputs(41, 4, 9)
    arrays = {"z": z.requires_grad_(), "r": r.requires_grad_(), "t": t}
    [fused] = fusable(CALLS)
    found = fused.compute(arrays, track_grad_norms=True)
    apart = {c.name: c.fn(*(arrays[n] for n in c.inputs), **c.options) for c in CALLS}
    for name, value in apart.items():
        torch.testing.assert_close(found.values[name], value.detach())
    wanted = torch.autograd.grad(sum(c.weight * apart[c.name] for c in CALLS), (z, r))
    for a, b in zip(torch.autograd.grad(found.total, (z, r)), wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert set(found.grad_norms) == {"ce", "spread", "drift", "total"}


def test_a_sum_stays_a_sum() -> None:
    z, _, _ = inputs(42, 4, 9)
    calls = [LogitCall(n, f.entropy, ("z",), 1.0, {"reduction": "sum"}) for n in ("a", "b")]
    [fused] = fusable(calls)
    torch.testing.assert_close(fused.compute({"z": z}).values["b"], f.entropy(z, reduction="sum"))


@pytest.mark.parametrize(
    "other",
    [
        LogitCall("x", torch.sum, ("z",), 1.0, {"mask": MASK}),
        LogitCall("x", f.target_logprobs, ("z", "t"), 1.0, {"mask": MASK}),
        LogitCall("x", f.js, ("z", "another"), 1.0, {"mask": MASK}),
        LogitCall("x", f.js, ("other", "r"), 1.0, {"mask": MASK}),
        LogitCall("x", f.cross_entropy, ("z", "other"), 1.0, {"mask": MASK}),
        LogitCall("x", f.z_loss, ("z",), 1.0, {"mask": MASK.clone()}),
        LogitCall("x", f.z_loss, ("z",), 1.0, {"mask": MASK, "reduction": "sum"}),
        LogitCall("x", f.z_loss, ("z",), 1.0, {"mask": MASK, "reduction": "none"}),
    ],
)
def test_what_does_not_go_together(other: Any) -> None:
    assert group(*CALLS, other) == [("ce", "spread", "drift")]
    assert group(other, CALLS[1]) in ([], [("x", "spread")])


def test_a_second_group() -> None:
    more = [LogitCall(n, f.entropy, ("y",)) for n in ("c", "d")]
    assert group(more[0], *CALLS, more[1]) == [("c", "d"), ("ce", "spread", "drift")]
    assert group() == []
