"""A projection in place of logits: shapes, rows, constants."""

from __future__ import annotations

import torch

from steelyard.penalties.from_logits import (
    Projection,
    compose_logits,
    cross_entropy,
    entropy,
    fusable,
    js,
    kl,
)
from steelyard.penalties.from_logits.fusion import LogitCall
from tests.penalties.from_logits.projection_cases import (
    CLASSES,
    SHAPE,
    Case,
)


def test_a_reference_that_is_a_projection_is_a_constant() -> None:
    case = Case(24)
    for part in case.beside:
        part.requires_grad_()
    logits = case.projection.logits().detach().requires_grad_()
    for z in (case.projection, logits):
        for value in (
            kl(z, case.reference, direction="reverse"),
            compose_logits(z, ["js"], reference=case.reference).total,
        ):
            value.backward()
            assert [part.grad for part in case.beside] == [None] * 3
    torch.testing.assert_close(js(logits, case.reference), js(case.projection, case.reference))
    assert logits.grad is not None


def test_calls_over_a_projection_are_fused() -> None:
    case = Case(29)
    read = {"logits": case.projection}
    calls = [
        LogitCall("a", entropy, read, 0.5),
        LogitCall("b", cross_entropy, {**read, "targets": case.targets}),
    ]
    [group] = fusable(calls)
    found = group.compute()
    torch.testing.assert_close(found.values["a"], entropy(case.projection.logits()).detach())


def test_shape_rows_and_logits() -> None:
    case = Case(30)
    projection = case.projection
    assert projection.shape == (*SHAPE, CLASSES) == projection.logits().shape
    assert [each.shape for each in projection] == [(5, CLASSES)] * 3
    assert projection[case.mask].shape == (int(case.mask.sum()), CLASSES)
    torch.testing.assert_close(projection[1].logits(), torch.nn.functional.linear(*case.leaves)[1])
    one = entropy(Projection(case.leaves[0][0, 0], case.leaves[1]), reduction="none")
    assert one.shape == ()
