"""Parameters to transform, and the checks that every transform's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from steelyard.integrations.optim import Transform, attach

W = [[2.0, 0.0, -4.0], [0.5, -0.5, 1.0]]
G = [[1.0, 2.0, 3.0], [-1.0, 0.0, 4.0]]
NUMBER = "{} must be a finite number {}, or a schedule that gives such, got {}."
LARGE_SHAPES = [(1100, 1000), (1_100_000,), (1, 1_100_000)]


def parameter(weights: Any, gradient: Any, dtype: torch.dtype = torch.float64) -> Parameter:
    made = Parameter(torch.tensor(weights, dtype=dtype))
    made.grad = torch.tensor(gradient, dtype=dtype)
    return made


def sparse(rows: list[int], values: Any, weights: Any) -> Parameter:
    """A parameter whose gradient stores `values` for `rows`, which may repeat."""
    made = Parameter(torch.tensor(weights, dtype=torch.float64))
    indices = torch.tensor([rows])
    stored = torch.tensor(values, dtype=torch.float64)
    made.grad = torch.sparse_coo_tensor(indices, stored, made.shape, check_invariants=True)
    return made


def random_parameters(seed: int, dtype: torch.dtype = torch.float64) -> list[Parameter]:
    """Parameters of rank 2, 1, 4 and 0 with gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (5,), (2, 3, 2, 2), ()]
    made = []
    for shape in shapes:
        one = Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        one.grad = (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        made.append(one)
    return made


def transformed(*transforms: Transform, parameters: list[Parameter], lr: float = 0.0) -> list[Any]:
    """The gradients, after a step of SGD that by default moves nothing."""
    optimizer = torch.optim.SGD(parameters, lr=lr)
    with attach(optimizer, transforms):
        optimizer.step()
    return [p.grad for p in parameters]


def close(found: Any, expected: Any, rel: float = 1e-12) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=rel, atol=rel)


def check_matrix(transform: Transform, expected: Any) -> None:
    """Check the gradient G of the weights W, and that the weights stay."""
    weights = parameter(W, G)
    [gradient] = transformed(transform, parameters=[weights])
    close(gradient, expected)
    close(weights.detach(), W)


def check_not_contiguous(transform: Transform, expected: Any) -> None:
    """Check the same of the transposed matrices, for a transform that treats all axes alike."""
    weights = Parameter(torch.tensor(W, dtype=torch.float64).t())
    weights.grad = torch.tensor(G, dtype=torch.float64).t()
    close(transformed(transform, parameters=[weights])[0].t(), expected)


def check_optax(ours: Transform, theirs: Any) -> None:
    """Check that optax 0.2.8 gives the same; its units are on the last axis."""

    def last(tensor: Tensor | None) -> Any:
        assert tensor is not None
        array = tensor.detach().numpy()
        return np.moveaxis(array, 0, -1) if array.ndim else array

    transform: optax.GradientTransformation = theirs
    parameters = random_parameters(2, torch.float32)
    weights, gradients = [last(p) for p in parameters], [last(p.grad) for p in parameters]
    updates, _ = transform.update(gradients, transform.init(weights), weights)
    expected = [np.moveaxis(np.asarray(u), -1, 0) if u.ndim else np.asarray(u) for u in updates]
    for found, want in zip(transformed(ours, parameters=parameters), expected, strict=True):
        close(found, want, 2e-6)


def check_split(transform: Transform, shape: Any) -> None:
    """Check that a tensor too large for one batch is transformed as if it were not split."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn((2, *shape), generator=generator)
    whole, split = Parameter(values[0].double()), Parameter(values[0].clone())
    whole.grad, split.grad = values[1].double(), values[1].clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steelyard.integrations.optim.transform._CPU_BATCH_SIZE", 2**40)
        transformed(transform, parameters=[whole], lr=0.1)
    transformed(transform, parameters=[split], lr=0.1)
    close(split.grad, whole.grad, 1e-5)
    close(split.detach(), whole.detach(), 1e-5)


def check_sparse(transform: Transform) -> None:
    """Check that a sparse gradient is transformed as the dense one, and stays sparse."""
    weights = [[1.0, 2.0], [3.0, -4.0], [0.0, 0.0], [0.5, 0.5]]
    twice = sparse([3, 1, 3], [[1.0, 2.0], [3.0, 5.0], [-4.0, 1.0]], weights)
    assert twice.grad is not None
    dense = parameter(weights, twice.grad.to_dense().tolist())
    [gradient] = transformed(transform, parameters=[twice], lr=0.1)
    [expected] = transformed(transform, parameters=[dense], lr=0.1)
    assert gradient.is_sparse
    close(gradient.to_dense(), expected)
    close(twice.detach(), dense.detach())


def check_dtype_kept(transform: Transform, dtype: torch.dtype) -> None:
    weights = Parameter(torch.full((2, 4096), 0.5, dtype=dtype))
    weights.grad = torch.full((2, 4096), 64.0, dtype=dtype)
    [gradient] = transformed(transform, parameters=[weights])
    assert gradient.dtype == dtype
