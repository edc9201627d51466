"""Validation of the inputs of functions over logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.errors import InputError
from steelyard.penalties import from_logits
from steelyard.penalties.from_logits._logit_inputs import accept_rows, check_targets
from tests.penalties.backends import Backend
from tests.penalties.from_logits.cases import inputs

BAD: Any = "x"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda z, t: from_logits.entropy(z, mode=BAD), "mode must be one of 'penalty', 'bonus'"),
        (lambda z, t: from_logits.entropy(z, reduction=BAD), "reduction must be one of"),
        (lambda z, t: from_logits.entropy(z, temperature=0), "temperature must be a finite"),
        (lambda z, t: from_logits.entropy(t), "logits must hold floating-point numbers, got int64"),
        (lambda z, t: from_logits.entropy(z[0, 0]), "logits must have classes on their last axis"),
        (lambda z, t: from_logits.kl(z, z[:1]), "logits and reference must have the same shape"),
        (lambda z, t: from_logits.kl(z, z, direction=BAD), "direction must be one of 'forward'"),
        (lambda z, t: from_logits.kl(z, z, max_log_ratio=-1), "max_log_ratio must be None or"),
        (lambda z, t: from_logits.cross_entropy(z, z[:, 0]), "targets must hold integers"),
        (lambda z, t: from_logits.cross_entropy(z, t[:1]), "targets must have the shape of logits"),
        (lambda z, t: from_logits.js(z, z, mask=t), "mask must hold booleans, got int64"),
    ],
)
def test_bad_inputs_are_named(backend: Backend, make: Any, message: str) -> None:
    z, t = backend.array(np.zeros((2, 3)), "float32"), backend.array([0, 1], "int64")
    with pytest.raises(InputError) as caught:
        make(z, t)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_a_target_that_is_no_class_is_named(kind: Any) -> None:
    with pytest.raises(InputError, match=r"targets must be in \[0, 2\] .* got 3"):
        from_logits.cross_entropy(kind(np.zeros((2, 3))), kind(np.array([0, 3])))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
def test_targets_of_narrow_integers(backend: Backend, dtype: str) -> None:
    """300 classes do not fit into 8 bits, and 40000 not into 16."""
    z = backend.array(np.zeros((2, 40000 if dtype == "int16" else 300)))
    found = from_logits.cross_entropy(z, backend.array([5, 127], dtype), reduction="none")
    np.testing.assert_allclose(backend.numpy(found), math.log(z.shape[1]))


def test_strided_inputs() -> None:
    logits, reference, _ = inputs(5, 12, 10, torch.float32)
    turned = logits.t().contiguous().t().requires_grad_()
    skipped = torch.stack([reference, reference], 1)[:, 0].requires_grad_()
    value = from_logits.kl(turned, skipped)
    torch.testing.assert_close(value, from_logits.kl(logits, reference))
    value.backward()
    plain = logits.clone().requires_grad_()
    from_logits.kl(plain, reference).backward()
    torch.testing.assert_close(turned.grad, plain.grad)


def test_shapes_of_results(backend: Backend) -> None:
    one = backend.array([0.0, 0.0, 0.0])
    np.testing.assert_allclose(backend.numpy(from_logits.entropy(one)), math.log(3))
    assert from_logits.entropy(one, reduction="none").shape == ()
    empty = backend.array(np.zeros((0, 3)))
    assert backend.numpy(from_logits.entropy(empty)) == 0
    assert from_logits.entropy(empty, reduction="none").shape == (0,)
    single = backend.array(np.zeros((2, 1)))
    assert backend.numpy(from_logits.entropy(single, normalize=True)) == 0


def test_leading_axes_are_flattened() -> None:
    z, t = np.arange(24.0).reshape(2, 3, 4), np.arange(6).reshape(2, 3) % 4
    mask = np.array([[True], [False]])  # broadcast to the leading axes
    rows = accept_rows(z, z + 1, t, mask)
    assert rows.shape == (2, 3)
    assert rows.classes == 4
    np.testing.assert_array_equal(rows.logits, z.reshape(6, 4))
    np.testing.assert_array_equal(rows.targets, [0, 1, 2, 3, 0, 1])
    np.testing.assert_array_equal(rows.mask, [True, True, True, False, False, False])


def test_factors_of_rows() -> None:
    free = accept_rows(np.zeros((4, 2)))
    assert (free.scale("mean"), free.scale("sum")) == ((None, 0.25), (None, 1.0))
    masked = accept_rows(np.zeros((4, 2)), mask=np.array([True, True, False, False]))
    factors, share = masked.scale("mean")
    np.testing.assert_array_equal(factors, [0.5, 0.5, 0.0, 0.0])
    assert share == 1.0


def test_targets_of_masked_rows_are_not_checked() -> None:
    targets = np.array([0, 7])
    check_targets(targets, np.array([True, False]), 3)
    check_targets(None, None, 3)
    with pytest.raises(InputError, match="got 7"):
        check_targets(targets, None, 3)
