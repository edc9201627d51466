"""Gradient centralization: values by hand and beside optax."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest
import torch
from torch.nn import Parameter

from steelyard.errors import InputError, SpecError
from steelyard.integrations.optim import centralize
from tests.integrations.optim.transform_checks import (
    LARGE_SHAPES,
    check_dtype_kept,
    check_matrix,
    check_sparse,
    check_split,
    close,
    parameter,
    random_parameters,
    transformed,
)


def test_matrix_by_hand() -> None:
    check_matrix(centralize(), [[-1.0, 0.0, 1.0], [-2.0, -1.0, 3.0]])


def test_vectors_and_scalars_stay_as_they_are() -> None:
    vector, scalar = parameter([3.0, 4.0], [6.0, 8.0]), parameter(2.0, -10.0)
    found = transformed(centralize(), parameters=[vector, scalar])
    assert [gradient.tolist() for gradient in found] == [[6.0, 8.0], -10.0]


def test_a_gradient_of_zero_stays_zero() -> None:
    zero = parameter([[0.0, 0.0]], [[0.0, 0.0]])
    assert transformed(centralize(), parameters=[zero])[0].tolist() == [[0.0, 0.0]]


def test_centralize_is_optaxs() -> None:
    parameters = random_parameters(3, torch.float32)
    gradients = [np.asarray(p.grad) for p in parameters]
    theirs = optax.centralize()
    expected, _ = theirs.update(gradients, theirs.init(gradients))
    found = transformed(centralize(), parameters=parameters)
    for one, want in zip(found, expected, strict=True):
        close(one, want, 1e-6)


@pytest.mark.parametrize("shape", LARGE_SHAPES)
def test_large_tensors_are_split_without_a_trace(shape: Any) -> None:
    check_split(centralize(), shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    check_dtype_kept(centralize(), dtype)


def test_a_sparse_gradient_is_centralized_as_the_dense_one() -> None:
    check_sparse(centralize())


def test_a_gradient_that_is_sparse_in_every_axis_is_refused() -> None:
    weights = Parameter(torch.zeros(2, 2))
    weights.grad = torch.eye(2).to_sparse()
    with pytest.raises(InputError, match=r"sparse by rows .* got layout torch.sparse_coo for para"):
        transformed(centralize(), parameters=[weights])


def test_where_must_be_a_function() -> None:
    with pytest.raises(SpecError) as caught:
        centralize(where=[1])  # type: ignore[arg-type]
    assert str(caught.value) == (
        "where must be a function of a parameter, got [1] (centralize): write for example "
        "where=lambda p: p.ndim > 1."
    )
