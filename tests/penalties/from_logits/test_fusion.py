"""Fusion of calls: which are grouped, and that the results equal separate calls."""

from __future__ import annotations

import pytest
import torch

from steelyard.penalties import from_logits as f
from steelyard.penalties.from_logits.fusion import LogitCall, fusable, is_fusable
from tests.penalties.from_logits.cases import inputs

Z, R, T = inputs(41, 4, 9)
MASK = torch.tensor([True, False, True, True])
READ = {"logits": Z.requires_grad_(), "mask": MASK}
CALLS = [
    LogitCall("ce", f.cross_entropy, {**READ, "targets": T}),
    LogitCall("spread", f.entropy, READ, -0.1, {"mode": "bonus"}),
    LogitCall(
        "drift", f.kl, {**READ, "reference": R.requires_grad_()}, 0.3, {"direction": "reverse"}
    ),
]


def group(*calls: LogitCall) -> list[tuple[str, ...]]:
    return [each.names for each in fusable(calls)]


def test_fused_results_equal_separate_calls() -> None:
    [fused] = fusable(CALLS)
    found = fused.compute(track_grad_norms=True)
    separate = {c.name: c.fn(**c.arrays, **c.options) for c in CALLS}
    for name, value in separate.items():
        torch.testing.assert_close(found.values[name], value.detach())
    wanted = torch.autograd.grad(sum(c.weight * separate[c.name] for c in CALLS), (Z, R))
    for a, b in zip(torch.autograd.grad(found.total, (Z, R)), wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert set(found.grad_norms) == {"ce", "spread", "drift", "total"}


def test_the_reduction_sum_is_kept() -> None:
    calls = [LogitCall(n, f.entropy, {"logits": Z}, 1.0, {"reduction": "sum"}) for n in ("a", "b")]
    [fused] = fusable(calls)
    alone = f.entropy(Z, reduction="sum").detach()
    torch.testing.assert_close(fused.compute().values["b"], alone)


@pytest.mark.parametrize(
    "other",
    [
        LogitCall("x", torch.sum, READ),
        LogitCall("x", f.target_logprobs, {**READ, "targets": T}),
        LogitCall("x", f.js, {**READ, "reference": R.clone()}),
        LogitCall("x", f.js, {**READ, "logits": Z.clone(), "reference": R}),
        LogitCall("x", f.cross_entropy, {**READ, "targets": T.clone()}),
        LogitCall("x", f.z_loss, {**READ, "mask": MASK.clone()}),
        LogitCall("x", f.z_loss, {"logits": Z}),
        LogitCall("x", f.z_loss, {"logits": Z}, 1.0, {"mask": MASK}),
        LogitCall("x", f.z_loss, READ, 1.0, {"reduction": "sum"}),
        LogitCall("x", f.z_loss, READ, 1.0, {"reduction": "none"}),
        LogitCall("x", f.z_loss, READ, 1.0, {"temperature": 2.0}),
        LogitCall("x", f.z_loss, READ, 1.0, {"temperature": -1.0}),
        LogitCall("x", f.z_loss, READ, 1.0, {"unknown": 1}),
        LogitCall(
            "x",
            f.kl,
            {**READ, "reference": R},
            1.0,
            {"max_log_ratio": 3.0, "direction": "symmetric"},
        ),
    ],
)
def test_calls_that_cannot_be_fused(other: LogitCall) -> None:
    assert group(*CALLS, other) == [("ce", "spread", "drift")]


def test_a_call_that_cannot_be_fused_fits_no_other() -> None:
    other = LogitCall("x", torch.sum, READ)
    assert not other.fits(CALLS[0])
    assert not CALLS[0].fits(other)
    assert CALLS[0].fits(CALLS[1])


def test_directions_and_modes_of_one_kind_are_fused() -> None:
    calls = [
        LogitCall("there", f.kl, {**READ, "reference": R}),
        LogitCall("back", f.kl, {**READ, "reference": R}, 1.0, {"direction": "reverse"}),
        LogitCall("both", f.kl, {**READ, "reference": R}, 1.0, {"direction": "symmetric"}),
        LogitCall("sure", f.entropy, READ),
        LogitCall("open", f.entropy, READ, 1.0, {"mode": "bonus"}),
    ]
    assert group(*calls) == [("there", "back", "both", "sure", "open")]


def test_calls_over_other_logits_form_a_second_group() -> None:
    more = [LogitCall(n, f.entropy, {"logits": R}) for n in ("c", "d")]
    assert group(more[0], *CALLS, more[1]) == [("c", "d"), ("ce", "spread", "drift")]
    assert group() == []


def test_a_call_is_built_from_its_arguments() -> None:
    given = LogitCall.of("drift", f.kl, [Z, R], {"mask": MASK}, 0.3, {"direction": "reverse"})
    assert given is not None
    assert given.fits(CALLS[0])
    assert (given.arrays["logits"] is Z, given.arrays["reference"] is R) == (True, True)
    assert LogitCall.of("x", torch.sum, [Z], {}) is None
    assert LogitCall.of("x", f.entropy, [Z, R], {}) is None
    assert LogitCall.of("x", f.entropy, [Z], {}, options={"reduction": "none"}) is None
    assert (is_fusable(f.entropy), is_fusable(torch.sum)) == (True, False)
