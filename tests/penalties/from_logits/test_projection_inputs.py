"""Validation of projections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import InputError
from steelyard.penalties.from_logits import (
    Projection,
    cross_entropy,
    kl,
)
from steelyard.penalties.from_logits.projection import accept_projection

X = torch.zeros


@pytest.mark.parametrize(
    ("z", "reference", "message"),
    [
        (Projection(np.zeros((2, 3)), X(4, 3)), X(2, 4), "hidden must be a torch tensor of a flo"),
        (Projection(X(2, 3), np.zeros((4, 3))), X(2, 4), "weight must be a torch tensor of a flo"),
        (Projection(X(2, 3).int(), X(4, 3)), X(2, 4), "hidden must be a torch tensor of a floatin"),
        (Projection(X(2, 3), X(4, 3).half()), X(2, 4), "weight must have the dtype of hidden, flo"),
        (Projection(X(2, 3), X(4, 3), X(4).half()), X(2, 4), "bias must have the dtype of hidden"),
        (Projection(X(2, 3), X(4, 2)), X(2, 4), "weight must have the shape [classes, features]"),
        (Projection(X(2, 3), X(0, 3)), X(2, 4), "weight must have the shape [classes, features]"),
        (Projection(X(2, 3), X(4, 3), X(3)), X(2, 4), "bias must have the shape (4,), got (3,)"),
        (Projection(X(2, 3), X(4, 3)), X(2, 3), "reference must have the shape (2, 4), got (2, 3)"),
        (Projection(X(2, 3), X(4, 3)), np.zeros((2, 4)), "reference must be a torch tensor or a"),
        (Projection(X(2, 3), X(4, 3)), X(2, 4).int(), "reference must hold floating-point numbers"),
        (
            Projection(X(2, 3), X(4, 3)),
            Projection(X(2, 3), X(4, 3), X(5)),
            "reference's bias must have the shape (4,), got (5,)",
        ),
        (
            Projection(X(2, 3), X(4, 3)),
            Projection(X(1, 3), X(4, 3)),
            "reference's hidden must have the shape (2, 3), got (1, 3)",
        ),
        (
            X(2, 5),
            Projection(X(2, 3), X(4, 3)),
            "logits and reference must have the same shape, got (2, 5) and (2, 4)",
        ),
    ],
)
def test_bad_arrays_are_named(z: Any, reference: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        kl(z, reference)
    assert str(caught.value).startswith(message)


def test_a_target_that_is_no_class_is_named() -> None:
    with pytest.raises(InputError, match=r"targets must be in \[0, 3\] where the mask is true"):
        cross_entropy(Projection(X(2, 3), X(4, 3)), torch.tensor([0, 4]))


def test_a_projection_is_flattened_with_its_reference() -> None:
    hidden = torch.arange(12.0).reshape(2, 2, 3)
    reference = Projection(X(2, 2, 5, requires_grad=True), X(4, 5, requires_grad=True))
    found = accept_projection(Projection(hidden, X(4, 3)), reference)
    assert found.rows.logits.shape == (4, 3)
    assert found.classes == 4
    assert found.reference is not None
    assert found.reference.shape == (4, 5)
    assert not found.reference.requires_grad
    assert found.reference_weight is not None
    assert not found.reference_weight.requires_grad


def test_the_default_chunk_has_a_fixed_number_of_logits() -> None:
    found = accept_projection(Projection(X(2, 3), X(2**10, 3)))
    assert found.chunk == 2**22 // 2**10  # on a CPU


@pytest.mark.parametrize(
    ("rows", "dtype", "wanted", "deferred"),
    [
        (12, torch.float32, [True, True, False], False),  # four rows for each feature
        (11, torch.float32, [True, True, False], True),
        (11, torch.float32, [True, False, True], False),  # the weight is not trained
        (12, torch.float16, [True, False, False], True),
        (12, torch.float16, [False, False, False], False),
    ],
)
def test_gradients_that_wait_for_the_backward_pass(
    rows: int, dtype: torch.dtype, wanted: list[bool], deferred: bool
) -> None:
    given = accept_projection(Projection(X(rows, 3, dtype=dtype), X(4, 3, dtype=dtype)))
    assert given.defers_gradient(wanted) == deferred
