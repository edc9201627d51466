"""`compose_linear` against `compose_logits` over the product of hidden states and weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import GradientError, InputError
from steelyard.penalties.from_logits import (
    Projection,
    compose_linear,
    compose_logits,
)
from tests.penalties.from_logits.cases import PLANS, TERMS, written
from tests.penalties.from_logits.projection_cases import SHAPE, Case, gradients

EVERY = list(TERMS)


@pytest.mark.parametrize("chunk", [None, 7])  # 15 tokens: the last chunk has one
@pytest.mark.parametrize("paired", [False, True])
def test_equals_compose_logits_over_the_product(chunk: int | None, paired: bool) -> None:
    made = torch.Generator().manual_seed(16)
    hidden, ref_hidden = (
        torch.randn(3, 5, 3, generator=made, dtype=torch.float64) for _ in range(2)
    )
    weight, ref_weight = (torch.randn(9, 3, generator=made, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(0, 9, (3, 5), generator=made)
    mask = torch.rand(3, 5, generator=made) > 0.3
    reference = ref_hidden @ ref_weight.T
    hidden.requires_grad_()
    weight.requires_grad_()
    given: dict[str, Any] = {"targets": targets, "mask": mask, "track_grad_norms": True}
    whole = compose_logits(hidden @ weight.T, written(EVERY), reference=reference, **given)
    wanted = torch.autograd.grad(3 * whole.total, (hidden, weight))
    either = (ref_hidden, ref_weight) if paired else reference
    found = compose_linear(hidden, weight, written(EVERY), reference=either, chunk=chunk, **given)
    torch.testing.assert_close(found.total, whole.total)
    torch.testing.assert_close(dict(found.values), dict(whole.values))
    torch.testing.assert_close(dict(found.grad_norms), dict(whole.grad_norms))
    torch.testing.assert_close(dict(found.cosines), dict(whole.cosines))
    assert found.gradient is None
    for a, b in zip(torch.autograd.grad(3 * found.total, (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_accumulates_in_float32() -> None:
    """300 chunks of one token: in bfloat16 the sum would stop growing."""
    hidden = torch.ones(300, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(300, dtype=torch.int64)
    compose_linear(
        hidden, weight, ["cross_entropy"], targets=targets, reduction="sum", chunk=1
    ).total.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.float(), torch.tensor([[-150.0], [150.0]]))


def test_without_gradients_and_without_reference() -> None:
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    found = compose_linear(hidden, weight, ["entropy"], reference=torch.zeros(4, 5))
    assert not found.total.requires_grad
    torch.testing.assert_close(
        found.values["entropy"], compose_logits(hidden @ weight.T, ["entropy"]).values["entropy"]
    )
    hidden.requires_grad_()
    value = compose_linear(hidden, weight, ["entropy"]).total
    with pytest.raises(GradientError, match="must be differentiated once"):
        torch.autograd.grad(value, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((np.zeros((2, 3)), torch.zeros(4, 3)), {}, "hidden must be a torch tensor of a floating"),
        (
            (torch.zeros(2, 3), torch.zeros(4, 3).half()),
            {},
            "weight must have the dtype of hidden, float32, got float16",
        ),
        ((torch.zeros(2, 3), torch.zeros(4, 2)), {}, "weight must have the shape [classes, feat"),
        ((torch.zeros(2, 3), torch.zeros(4, 3)), {"chunk": 0}, "chunk must be None or an integer"),
        (
            (torch.zeros(2, 3), torch.zeros(4, 3)),
            {"reference": torch.zeros(2, 3)},
            "reference must have the shape (2, 4), got (2, 3)",
        ),
        (
            (torch.zeros(2, 3), torch.zeros(4, 3)),
            {"reference": (torch.zeros(1, 3), torch.zeros(4, 3))},
            "reference's hidden must have the shape (2, 3), got (1, 3)",
        ),
        (
            (torch.zeros(2, 3), torch.zeros(4, 3)),
            {"reference": (torch.zeros(2, 3), torch.zeros(5, 3))},
            "reference's weight must have the shape (4, 3), got (5, 3)",
        ),
    ],
)
def test_bad_arrays_are_named(arrays: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        compose_linear(arrays[0], arrays[1], ["kl"], **{"reference": torch.zeros(2, 4), **options})
    assert str(caught.value).startswith(message)


def test_backward_twice() -> None:
    made = torch.Generator().manual_seed(19)
    hidden = torch.randn(4, 3, generator=made, requires_grad=True)
    weight = torch.randn(5, 3, generator=made, requires_grad=True)
    total = compose_linear(hidden, weight, ["entropy", "z_loss"], chunk=3).total
    exact = compose_logits(hidden @ weight.T, ["entropy", "z_loss"]).total
    wanted = torch.autograd.grad(exact, (hidden, weight))
    for factor, kept in ((0.5, True), (1.0, True), (0.5, False)):
        found = torch.autograd.grad(factor * total, (hidden, weight), retain_graph=kept)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, factor * b)


def test_weights_follow_schedules() -> None:
    hidden, weight = torch.ones(4, 3), torch.randn(5, 3)
    for step in (0, 3):
        found = compose_linear(hidden, weight, PLANS[0], step=step)
        by_projection = compose_logits(Projection(hidden, weight), PLANS[0], step=step)
        whole = compose_logits(hidden @ weight.T, PLANS[0], step=step)
        torch.testing.assert_close(found.total, whole.total)
        torch.testing.assert_close(by_projection.total, whole.total)


@pytest.mark.usefixtures("chunks_of_four")
@pytest.mark.parametrize("reference", ["projection", "pair", "array"])
def test_every_term_with_norms_equals_compose_logits(reference: str) -> None:
    case = Case(23)
    given: dict[str, Any] = {"targets": case.targets, "mask": case.mask, "track_grad_norms": True}
    beside: Any = case.reference.logits()
    whole = compose_logits(case.projection.logits(), written(TERMS), reference=beside, **given)
    if reference == "projection":
        beside = case.reference
    elif reference == "pair":  # its bias made a feature that is 1
        hidden, weight, bias = case.beside
        one = torch.ones(*SHAPE, 1, dtype=torch.float64)
        beside = (torch.cat([hidden, one], -1), torch.cat([weight, bias[:, None]], -1))
    found = compose_logits(case.projection, written(TERMS), reference=beside, **given)
    for each in ("values", "grad_norms", "cosines"):
        torch.testing.assert_close(dict(getattr(found, each)), dict(getattr(whole, each)))
    assert found.gradient is None
    pairs = zip(gradients(found.total, case), gradients(whole.total, case), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)
