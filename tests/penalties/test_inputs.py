"""What every penalty refuses: other things than arrays, integers, other shapes, odd masks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from steelyard import penalties
from steelyard.errors import InputError, SteelyardError

from .backends import Backend

ONE: list[Any] = [
    penalties.l1,
    penalties.l2,
    penalties.elastic_net,
    penalties.entropy,
    penalties.orthogonality,
    penalties.output_magnitude_penalty,
    penalties.validate,
]
TWO: list[Any] = [penalties.kl_divergence, penalties.js_divergence, penalties.consistency]
MASKED: list[Any] = [penalties.l1, penalties.l2, penalties.elastic_net, penalties.entropy, *TWO]


def call(fn: Any, x: Any, **options: Any) -> Any:
    return fn(x, x, **options) if fn in TWO else fn(x, **options)


def test_public_names() -> None:
    assert penalties.__all__ == sorted(penalties.__all__)
    assert set(penalties.__all__) == {
        "PenaltyPipeline",
        "consistency",
        "elastic_net",
        "entropy",
        "gradient_penalty",
        "interpolated_gradient_penalty",
        "js_divergence",
        "kl_divergence",
        "l1",
        "l2",
        "orthogonality",
        "output_magnitude_penalty",
        "validate",
    }
    modules = {"constraints", "divergences", "gradient_penalties", "pipeline", "primitives"}
    # `from_logits` is there once somebody has imported it.
    public = {name for name in vars(penalties) if not name.startswith("_")} - {"from_logits"}
    assert public == {*penalties.__all__, *modules, "validation"}


@pytest.mark.parametrize("name", penalties.__all__)
def test_every_name_is_documented(name: str) -> None:
    doc = getattr(penalties, name).__doc__
    for section in ("Args:", "Raises:", "Example:", ">>> ", "References:"):
        assert section in doc


@pytest.mark.parametrize("fn", [*ONE, *TWO])
@pytest.mark.parametrize("dtype", ["int32", "int64", "bool", "complex64"])
def test_only_floating_point(backend: Backend, fn: Any, dtype: str) -> None:
    with pytest.raises(InputError, match=f"must hold floating-point numbers .* got {dtype}"):
        call(fn, backend.array([[1, 0]], dtype))


@pytest.mark.parametrize("fn", [*ONE, *TWO])
@pytest.mark.parametrize("thing", [1.0, [1.0], None, "x"])
def test_only_arrays(fn: Any, thing: Any) -> None:
    with pytest.raises(InputError, match="must be NumPy, torch or JAX arrays"):
        call(fn, thing)


def test_a_value_error_of_ours() -> None:
    with pytest.raises(ValueError, match="floating-point") as caught:
        penalties.l1(np.array([1]))
    assert isinstance(caught.value, SteelyardError)


@pytest.mark.parametrize("fn", TWO)
def test_shapes_must_match(backend: Backend, fn: Any) -> None:
    a, b = backend.array(np.zeros((2, 3))), backend.array(np.zeros((1, 3)))
    with pytest.raises(InputError, match=r"must have the same shape, got .: \(2, 3\), .: \(1, 3\)"):
        fn(a, b)


@pytest.mark.parametrize("fn", TWO)
def test_kinds_must_match(autodiff: Backend, fn: Any) -> None:
    a, b = autodiff.array([[0.0]]), np.array([[0.0]])
    with pytest.raises(InputError, match=r"all of one kind, got .: \w+, .: \w+; convert"):
        fn(a, b)


@pytest.mark.parametrize("fn", MASKED)
def test_masks_are_boolean_and_broadcast(backend: Backend, fn: Any) -> None:
    x = backend.array(np.zeros((4, 2, 3)))
    with pytest.raises(InputError, match="mask must hold booleans, got float64; compare first"):
        call(fn, x, mask=backend.array([1.0, 0.0]))
    rows = fn in (penalties.entropy, penalties.kl_divergence, penalties.js_divergence)
    target = r"\(4, 2\)" if rows else r"\(4, 2, 3\)"
    for shape in [(5,), (4, 2, 3, 1)]:
        with pytest.raises(InputError, match=rf"mask must broadcast to {target} .* got shape"):
            call(fn, x, mask=backend.mask(np.ones(shape)))
    for thing in (True, [True]):
        with pytest.raises(InputError, match="mask must be NumPy, torch or JAX arrays"):
            call(fn, x, mask=thing)


def test_masks_of_every_broadcast(backend: Backend) -> None:
    x = backend.array(np.arange(6.0).reshape(2, 3))
    for mask, expected in [
        (True, 15),
        ([True, False, True], 0 + 2 + 3 + 5),
        ([[True], [False]], 3),
        ([[False, True, False]], 1 + 4),
    ]:
        assert backend.numpy(penalties.l1(x, mask=backend.mask(mask))) == expected


def test_a_mean_over_more_than_float32_can_count(backend: Backend) -> None:
    """2**24 + 1 is not a float32; a count summed in float32 would stop there."""
    size = 2**24 + 3
    x = backend.array(np.ones(size, np.float32), "float32")
    assert backend.numpy(penalties.l1(x, reduction="mean", mask=x > 0)) == 1.0


def test_checks_hold_inside_jit() -> None:
    x = jax.numpy.ones((2, 2))
    with pytest.raises(InputError, match="reduction must be one of"):
        jax.jit(lambda x: penalties.l1(x, reduction="all"))(x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must have the same shape"):
        jax.jit(penalties.kl_divergence)(x, x[:1])
