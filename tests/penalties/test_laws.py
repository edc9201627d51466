"""Mathematical laws of the penalties, tested by hypothesis on every backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from steelyard.penalties import (
    PenaltyPipeline,
    consistency,
    elastic_net,
    entropy,
    js_divergence,
    kl_divergence,
    l1,
    l2,
    orthogonality,
    output_magnitude_penalty,
)

from .backends import Backend, Floats

Penalty = Callable[..., Any]
few_examples = settings(
    max_examples=10,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
ROWS, CLASSES = 3, 4


def numbers(*shape: int, low: float = -10.0, high: float = 10.0) -> st.SearchStrategy[Floats]:
    finite = st.floats(low, high, allow_subnormal=False)
    return arrays(np.float64, shape, elements=finite)


@st.composite
def log_probabilities(draw: st.DrawFn) -> Floats:
    """Rows of log-probabilities, some of them -inf, at least one class with probability."""
    logits = draw(numbers(ROWS, CLASSES))
    dead = draw(arrays(np.bool_, (ROWS, CLASSES)))
    dead[:, draw(st.integers(0, CLASSES - 1))] = False
    logits = np.where(dead, -np.inf, logits)
    top = logits.max(-1, keepdims=True)
    logs: Floats = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return logs


def cosine(a: Any, b: Any, **options: Any) -> Any:
    return consistency(a, b, metric="cosine", **options)


def mse(a: Any, b: Any, **options: Any) -> Any:
    return consistency(a, b, metric="mse", **options)


def absolute(a: Any, b: Any, **options: Any) -> Any:
    return consistency(a, b, metric="l1", **options)


def symmetric_kl(p: Any, q: Any, **options: Any) -> Any:
    return kl_divergence(p, q, direction="symmetric", **options)


def reverse_kl(p: Any, q: Any, **options: Any) -> Any:
    return kl_divergence(p, q, direction="reverse", **options)


MAGNITUDES: list[Penalty] = [l1, l2, elastic_net]
DIVERGENCES: list[Penalty] = [kl_divergence, reverse_kl, symmetric_kl, js_divergence]
PAIRS: list[Penalty] = [*DIVERGENCES, mse, absolute, cosine]
SYMMETRIC: list[Penalty] = [symmetric_kl, js_divergence, mse, absolute, cosine]


def same(backend: Backend, a: Any, b: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(backend.numpy(a), backend.numpy(b), rtol=1e-9, atol=atol)


def assert_mean_is_sum_over_count(backend: Backend, fn: Penalty, *x: Any, **options: Any) -> None:
    each = backend.numpy(fn(*x, reduction="none", **options))
    same(backend, fn(*x, reduction="sum", **options), each.sum())
    same(backend, fn(*x, reduction="mean", **options), each.mean())


def assert_mask_removes(backend: Backend, fn: Penalty, x: list[Floats], kept: Floats) -> None:
    """Check that masking equals removing the elements or rows."""
    poisoned = [np.where(kept.reshape(kept.shape + (1,) * (a.ndim - 1)), a, np.nan) for a in x]
    mask = kept.reshape(kept.shape + (1,) * (x[0].ndim - 1)) if fn in (mse, absolute) else kept
    for reduction in ("sum", "mean"):
        masked = fn(
            *(backend.array(a) for a in poisoned), mask=backend.mask(mask), reduction=reduction
        )
        if not kept.any():
            assert backend.numpy(masked) == 0
            continue
        same(backend, masked, fn(*(backend.array(a[kept]) for a in x), reduction=reduction))


@pytest.mark.parametrize("fn", MAGNITUDES)
@few_examples
@given(x=numbers(5), kept=arrays(np.bool_, 5), scale=st.floats(-3, 3))
def test_laws_of_magnitude_penalties(
    backend: Backend, fn: Penalty, x: Floats, kept: Any, scale: float
) -> None:
    array = backend.array(x)
    value = backend.numpy(fn(array))
    assert value >= 0
    assert (value == 0) == np.all(np.abs(x) ** 2 == 0) or fn is not l2
    assert backend.numpy(fn(array * 0)) == 0
    same(backend, fn(-array), value)
    same(backend, fn(backend.array(x[::-1])), value)
    same(backend, fn(array, scale=scale), scale * value)
    assert_mean_is_sum_over_count(backend, fn, array)
    assert_mask_removes(backend, fn, [x], kept)


@few_examples
@given(x=numbers(5), shift=st.floats(-5, 5), clip=st.floats(0.1, 5))
def test_centred_l2_ignores_shifts(backend: Backend, x: Floats, shift: float, clip: float) -> None:
    here, there = backend.array(x), backend.array(x + shift)
    same(backend, l2(here, center="mean"), l2(there, center="mean"), atol=1e-9)
    same(backend, l2(here), l2(there, center=shift), atol=1e-9)
    assert backend.numpy(l2(here, clip=clip, reduction="none")).max() <= clip**2 * (1 + 1e-12)


@few_examples
@given(x=numbers(5), ratio=st.floats(0, 1))
def test_elastic_net_is_the_mixture_of_l1_and_l2(backend: Backend, x: Floats, ratio: float) -> None:
    array = backend.array(x)
    mixture = ratio * backend.numpy(l1(array)) + (1 - ratio) * backend.numpy(l2(array))
    same(backend, elastic_net(array, l1_ratio=ratio), mixture)


@pytest.mark.parametrize("fn", PAIRS)
@few_examples
@given(p=log_probabilities(), q=log_probabilities(), kept=arrays(np.bool_, ROWS))
def test_laws_of_two_argument_penalties(
    backend: Backend, fn: Penalty, p: Floats, q: Floats, kept: Any
) -> None:
    if fn not in DIVERGENCES:
        p, q = np.exp(p), np.exp(q)
    a, b = backend.array(p), backend.array(q)
    rows = backend.numpy(fn(a, b, reduction="none"))
    assert np.all(rows >= -1e-12)
    assert np.all(np.isfinite(rows))
    same(backend, fn(a, a), 0.0)
    different = np.abs(np.exp(p) - np.exp(q)).max(-1) > 1e-3
    if fn not in (mse, absolute):
        assert np.all(rows[different] > 0)
    turned = np.random.default_rng(0).permutation(CLASSES)
    same(backend, fn(backend.array(p[:, turned]), backend.array(q[:, turned])), fn(a, b))
    assert_mean_is_sum_over_count(backend, fn, a, b)
    assert_mask_removes(backend, fn, [p, q], kept)


@pytest.mark.parametrize("fn", SYMMETRIC)
@few_examples
@given(p=log_probabilities(), q=log_probabilities())
def test_symmetry(backend: Backend, fn: Penalty, p: Floats, q: Floats) -> None:
    if fn not in DIVERGENCES:
        p, q = np.exp(p), np.exp(q)
    a, b = backend.array(p), backend.array(q)
    same(backend, fn(a, b), fn(b, a))


@few_examples
@given(p=log_probabilities(), q=log_probabilities())
def test_js_is_bounded_by_kl(backend: Backend, p: Floats, q: Floats) -> None:
    a, b = backend.array(p), backend.array(q)
    rows = backend.numpy(js_divergence(a, b, reduction="none"))
    assert np.all((rows >= 0) & (rows <= math.log(2) + 1e-12))
    # JS <= ½ · symmetric KL, where the log ratio is not clamped.
    exact = backend.numpy(kl_divergence(a, b, direction="symmetric", max_log_ratio=None))
    assert np.mean(rows) <= exact / 2 + 1e-12
    same(backend, kl_divergence(a, b, direction="reverse"), kl_divergence(b, a))


@few_examples
@given(p=log_probabilities(), temperature=st.floats(0.1, 10), kept=arrays(np.bool_, ROWS))
def test_entropy(backend: Backend, p: Floats, temperature: float, kept: Any) -> None:
    x = backend.array(p)
    rows = backend.numpy(entropy(x, reduction="none"))
    classes = np.isfinite(p).sum(-1)
    assert np.all((rows >= -1e-12) & (rows <= np.log(classes) + 1e-12))
    share = backend.numpy(entropy(x, normalize=True, reduction="none"))
    same(backend, share, rows / math.log(CLASSES))
    same(backend, entropy(x, mode="bonus"), -rows.mean())
    warm = backend.numpy(entropy(x, temperature=temperature, reduction="none"))
    order = warm - rows if temperature > 1 else rows - warm
    assert np.all(order >= -1e-9), "heat raises entropy"
    # Only tempered log-probabilities are normalised, so only there a shift changes nothing.
    shifted = backend.array(p + 3.0)
    same(backend, entropy(shifted, temperature=2.0), entropy(x, temperature=2.0), atol=1e-9)
    assert_mean_is_sum_over_count(backend, entropy, x)
    assert_mask_removes(backend, entropy, [p], kept)


@pytest.mark.parametrize("mode", ["soft", "hard", "spectral"])
@few_examples
@given(x=numbers(3, 4, low=0.5), sizes=numbers(3, 1, low=0.5))
def test_orthogonality(backend: Backend, mode: Any, x: Floats, sizes: Floats) -> None:
    array = backend.array(x)
    value = orthogonality(array, mode=mode)
    assert backend.numpy(value) >= -1e-12
    same(backend, orthogonality(backend.array(x * sizes), mode=mode), value, atol=1e-9)
    same(backend, orthogonality(backend.array(x[[2, 0, 1]]), mode=mode), value, atol=1e-9)
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(4, 4)))[0]
    same(backend, orthogonality(backend.array(x @ turn), mode=mode), value, atol=1e-9)
    same(backend, orthogonality(backend.array(turn[:3]), mode=mode), 0.0, atol=1e-12)


@few_examples
@given(x=arrays(np.float64, array_shapes(max_dims=3, max_side=3), elements=st.floats(-5, 5)))
def test_output_magnitude(backend: Backend, x: Floats) -> None:
    size = math.sqrt(np.mean(x**2))
    array = backend.array(x)
    same(backend, output_magnitude_penalty(array, target=size), 0.0)
    same(backend, output_magnitude_penalty(array, target=size + 2), 4.0, atol=1e-9)
    same(backend, output_magnitude_penalty(-array), output_magnitude_penalty(array))


@few_examples
@given(x=numbers(4), weights=st.lists(st.floats(-3, 3), min_size=3, max_size=3))
def test_total_is_the_weighted_sum(backend: Backend, x: Floats, weights: list[float]) -> None:
    names = ["l1", "l2", "output_magnitude"]
    pipeline = PenaltyPipeline(
        [(name, {"weight": weight}) for name, weight in zip(names, weights, strict=True)]
    )
    total, metrics = pipeline.compute(backend.array(x))
    expected = sum(weight * metrics[name] for name, weight in zip(names, weights, strict=True))
    np.testing.assert_allclose(metrics["total"], expected, rtol=1e-9, atol=1e-9)
    assert metrics["total"] == backend.numpy(total)
    for name, weight in zip(names, weights, strict=True):
        assert metrics[f"{name}_weighted"] == weight * metrics[name]
