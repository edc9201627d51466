"""Weight decay: values by hand, beside optax, and bad arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optax
import pytest
import torch
from torch import Tensor

from steelyard.errors import InputError, SpecError
from steelyard.integrations.optim import (
    Transform,
    attach,
    elastic_net_decay,
    l1_decay,
    l2_decay,
)
from tests.integrations.optim.transform_checks import (
    LARGE_SHAPES,
    NUMBER,
    G,
    W,
    check_dtype_kept,
    check_matrix,
    check_not_contiguous,
    check_optax,
    check_sparse,
    check_split,
    close,
    parameter,
    sparse,
    transformed,
)

BY_HAND: dict[str, tuple[Transform, Any]] = {
    "l2": (l2_decay(0.5), [[2.0, 2.0, 1.0], [-0.75, -0.25, 4.5]]),
    "l1": (l1_decay(0.5), [[1.5, 2.0, 2.5], [-0.5, -0.5, 4.5]]),
    "elastic": (elastic_net_decay(0.5, 0.25), [[1.875, 2.0, 1.375], [-0.6875, -0.3125, 4.5]]),
    "half": (elastic_net_decay(1.0), [[2.5, 2.0, 0.5], [-0.25, -0.75, 5.0]]),
    "no decay": (l2_decay(0.0), G),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_matrix_by_hand(case: str) -> None:
    check_matrix(*BY_HAND[case])
    check_not_contiguous(*BY_HAND[case])


def test_elastic_net_of_ratio_0_and_1_is_l2_and_l1() -> None:
    for ratio, pure in ((0.0, l2_decay), (1.0, l1_decay)):
        for decoupled in (False, True):
            mixed, alone = parameter(W, G), parameter(W, G)
            transformed(elastic_net_decay(0.3, ratio, decoupled=decoupled), parameters=[mixed])
            transformed(pure(0.3, decoupled=decoupled), parameters=[alone])
            assert mixed.grad is not None
            assert alone.grad is not None
            assert torch.equal(mixed.grad, alone.grad)
            assert torch.equal(mixed, alone)


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_decoupled_decay_shrinks_weights_by_the_learning_rate_of_their_group(rate: Any) -> None:
    decays: list[tuple[Transform, Callable[[Tensor], Tensor]]] = [
        (l2_decay(0.5, decoupled=True), lambda w: w),
        (l1_decay(0.5, decoupled=True), torch.sign),
        (elastic_net_decay(0.5, 0.25, decoupled=True), lambda w: 0.25 * w.sign() + 0.75 * w),
    ]
    for transform, penalty_gradient in decays:
        first, second = parameter(W, G), parameter(W, G)
        groups = [{"params": [first]}, {"params": [second], "lr": 10 * rate}]
        optimizer = torch.optim.SGD(groups, lr=rate)
        start = torch.tensor(W, dtype=torch.float64)
        with attach(optimizer, [transform]):
            optimizer.step()
        gradient = torch.tensor(G, dtype=torch.float64)
        for found, lr in ((first, 0.1), (second, 1.0)):
            assert found.grad is not None
            assert torch.equal(found.grad, gradient)
            expected = start - lr * 0.5 * penalty_gradient(start) - lr * gradient
            close(found.detach(), expected, 1e-7)


def test_decoupled_decay_needs_a_learning_rate() -> None:
    class Rateless(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"speed": 1.0})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Do nothing."""

    weights = parameter([1.0, 1.0], [1.0, 1.0])
    optimizer = Rateless([weights])
    with pytest.raises(SpecError) as caught:
        attach(optimizer, [l1_decay(0.1, decoupled=True)])
    assert str(caught.value) == (
        "l1_decay with decoupled=True must have a learning rate 'lr' in every group, got the "
        "options 'speed' in group 0: use decoupled=False."
    )
    with attach(optimizer, [l1_decay(0.5)]):
        optimizer.step()
    assert weights.grad.tolist() == [1.5, 1.5]  # type: ignore[union-attr]  # set above


def test_l2_decay_is_optaxs() -> None:
    check_optax(l2_decay(0.2), optax.add_decayed_weights(0.2))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("shape", LARGE_SHAPES)
def test_large_tensors_are_split_without_a_trace(decoupled: bool, shape: Any) -> None:
    check_split(elastic_net_decay(0.1, 0.25, decoupled=decoupled), shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    check_dtype_kept(l1_decay(0.5), dtype)
    check_dtype_kept(l2_decay(0.5), dtype)


@pytest.mark.parametrize(
    "transform", [l2_decay(0.5, decoupled=True), elastic_net_decay(0.5, 0.25, decoupled=True)]
)
def test_decoupled_decay_with_a_sparse_gradient_is_that_with_the_dense_one(
    transform: Transform,
) -> None:
    check_sparse(transform)


@pytest.mark.parametrize("transform", [l2_decay(0.1), l1_decay(0.1), elastic_net_decay(0.1)])
def test_coupled_decay_refuses_a_sparse_gradient(transform: Transform) -> None:
    one = sparse([0], [[1.0, 2.0]], [[1.0, 2.0]])
    message = (
        f"{transform.name} must have dense gradients, since it changes every element, got a "
        f"sparse one for parameter 0 of group 0, shape (1, 2): use decoupled=True"
    )
    with pytest.raises(InputError) as caught:
        transformed(transform, parameters=[one])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (l2_decay, {"d": -0.1}, NUMBER.format("d of l2_decay", ">= 0", "-0.1")),
        (l1_decay, {"d": math.nan}, NUMBER.format("d of l1_decay", ">= 0", "nan")),
        (elastic_net_decay, {"d": True}, NUMBER.format("d of elastic_net_decay", ">= 0", "True")),
        (
            elastic_net_decay,
            {"d": 1.0, "l1_ratio": 1.5},
            "l1_ratio must be a number in [0, 1], got 1.5 (elastic_net_decay).",
        ),
        (
            l2_decay,
            {"d": 1.0, "decoupled": 1},
            "decoupled must be True or False, got 1 (l2_decay).",
        ),
    ],
)
def test_bad_arguments_are_refused_when_built(
    make: Callable[..., Transform], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        make(**options)
    assert str(caught.value) == message
