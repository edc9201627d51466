"""KL, JS and entropy: by hand, against other libraries, at zero probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats  # type: ignore[import-untyped]  # SciPy has no types
import torch
from scipy.spatial.distance import jensenshannon  # type: ignore[import-untyped]
from scipy.special import rel_entr  # type: ignore[import-untyped]

from steelyard.errors import InputError
from steelyard.penalties import entropy, js_divergence, kl_divergence

from .backends import Backend, Floats

LOG_2 = math.log(2)
INF = math.inf
# Log-probabilities with zeros on one side, the other, and both.
HARD_P = [[0.0, -INF, -INF], [-LOG_2, -LOG_2, -INF], [-INF, -INF, 0.0]]
HARD_Q = [[-INF, 0.0, -INF], [-INF, -LOG_2, -LOG_2], [-INF, -INF, 0.0]]


def distributions(seed: int, *shape: int) -> Floats:
    logits = np.random.default_rng(seed).normal(size=shape)
    shifted: Floats = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    return shifted


P, Q = distributions(0, 4, 5), distributions(1, 4, 5)


@pytest.mark.parametrize(
    ("direction", "expected"),
    [
        ("forward", 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        ("reverse", 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)),
        ("symmetric", 0.5 * math.log(4 / 3) * 0.5 + 0.5 * (0.75 * math.log(3) - math.log(2))),
    ],
)
def test_kl_by_hand(backend: Backend, direction: Any, expected: float) -> None:
    p, q = (backend.array(np.log([x]), "float32") for x in ([0.5, 0.5], [0.25, 0.75]))
    value = kl_divergence(p, q, direction=direction)
    assert backend.dtype(value) == "float32"
    np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-6)


def test_kl_agrees_with_scipy_and_torch(backend: Backend) -> None:
    """SciPy 1.17 rel_entr; torch 2.13 kl_div and distributions."""
    rows = backend.numpy(kl_divergence(backend.array(P), backend.array(Q), reduction="none"))
    np.testing.assert_allclose(rows, rel_entr(np.exp(P), np.exp(Q)).sum(-1), rtol=1e-12)
    p, q = torch.as_tensor(P), torch.as_tensor(Q)
    fused = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(rows, fused, rtol=1e-12)
    classes = torch.distributions.Categorical
    reverse = torch.distributions.kl_divergence(classes(logits=q), classes(logits=p))
    np.testing.assert_allclose(
        backend.numpy(
            kl_divergence(backend.array(P), backend.array(Q), direction="reverse", reduction="none")
        ),
        reverse,
        rtol=1e-12,
    )


def test_js_agrees_with_scipy(backend: Backend) -> None:
    """SciPy 1.17 jensenshannon, which is the square root."""
    rows = backend.numpy(js_divergence(backend.array(P), backend.array(Q), reduction="none"))
    np.testing.assert_allclose(rows, jensenshannon(np.exp(P), np.exp(Q), axis=-1) ** 2, rtol=1e-11)


def test_entropy_agrees_with_scipy_and_torch(backend: Backend) -> None:
    """SciPy 1.17 stats.entropy; torch 2.13 Categorical."""
    rows = backend.numpy(entropy(backend.array(P), reduction="none"))
    np.testing.assert_allclose(rows, scipy.stats.entropy(np.exp(P), axis=-1), rtol=1e-12)
    cool = backend.numpy(entropy(backend.array(P), temperature=0.5, reduction="none"))
    categorical: Any = torch.distributions.Categorical(logits=torch.as_tensor(P) / 0.5)
    np.testing.assert_allclose(cool, categorical.entropy(), rtol=1e-12)


def test_entropy_by_hand(backend: Backend) -> None:
    x = backend.array(np.log([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]), "float32")
    first, second = 1.5 * LOG_2, math.log(3)
    table: list[tuple[dict[str, Any], Any]] = [
        ({}, (first + second) / 2),
        ({"reduction": "sum"}, first + second),
        ({"mode": "bonus"}, -(first + second) / 2),
        ({"normalize": True, "reduction": "none"}, [first / second, 1.0]),
        ({"normalize": True, "mode": "bonus", "reduction": "none"}, [-first / second, -1.0]),
    ]
    for options, expected in table:
        value = entropy(x, **options)
        np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-6)


def test_bonus_raises_entropy_and_penalty_lowers_it(autodiff: Backend) -> None:
    x = autodiff.array([1.0, 0.0, -1.0])

    def loss(mode: Any) -> Any:
        def of(logits: Any) -> Any:
            # temperature=2 normalises by itself
            return entropy(logits, mode=mode, temperature=2.0)

        return of

    before = float(entropy(x, temperature=2.0))
    for mode, sign in [("penalty", -1), ("bonus", 1)]:
        [gradient] = autodiff.gradients(loss(mode), x)
        after = float(entropy(autodiff.array(autodiff.numpy(x) - gradient), temperature=2.0))
        assert sign * (after - before) > 0


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
@pytest.mark.parametrize("limit", [100.0, 7.0])
def test_kl_at_zero_probabilities(backend: Backend, direction: Any, limit: float) -> None:
    p, q = backend.array(HARD_P, "float32"), backend.array(HARD_Q, "float32")
    rows = kl_divergence(p, q, direction=direction, reduction="none", max_log_ratio=limit)
    # The only ratio of row 1 that has a weight and is finite is 0.
    np.testing.assert_allclose(backend.numpy(rows), [limit, 0.5 * limit, 0.0], rtol=1e-6)


def test_exact_kl_is_infinite_where_q_is_zero_and_p_is_not(backend: Backend) -> None:
    p = backend.array([[0.0, -INF], [-INF, 0.0], [0.0, -INF], [0.0, -200.0]], "float32")
    q = backend.array([[-INF, 0.0], [-INF, 0.0], [-0.5, -1.0], [0.0, -INF]], "float32")
    rows = kl_divergence(p, q, max_log_ratio=None, reduction="none")
    # exp(-200) is 0 in float32: no weight, whatever the ratio.
    np.testing.assert_array_equal(backend.numpy(rows), [INF, 0, 0.5, 0])


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
@pytest.mark.parametrize("limit", [100.0, None])
def test_kl_gradient_at_zero_probabilities(
    autodiff: Backend, direction: Any, limit: float | None
) -> None:
    p = autodiff.array([[-LOG_2, -LOG_2, -INF, -INF]], "float32")
    q = autodiff.array([[math.log(0.25), math.log(0.75), -INF, -INF]], "float32")

    def divergence(p: Any, q: Any) -> Any:
        return kl_divergence(p, q, direction=direction, max_log_ratio=limit)

    at_zero = autodiff.gradients(divergence, p, q)
    without = autodiff.gradients(divergence, p[:, :2], q[:, :2])
    for whole, without_zeros in zip(at_zero, without, strict=True):
        np.testing.assert_array_equal(whole[:, 2:], 0)
        np.testing.assert_allclose(whole[:, :2], without_zeros, rtol=1e-6)


def test_clamped_ratio_passes_no_gradient(autodiff: Backend) -> None:
    p, q = autodiff.array([[0.0, -INF]], "float32"), autodiff.array([[-INF, 0.0]], "float32")
    of_p, of_q = autodiff.gradients(kl_divergence, p, q)
    np.testing.assert_allclose(of_p, [[100, 0]], rtol=1e-6)
    np.testing.assert_array_equal(of_q, [[0, 0]])


def test_js_and_entropy_at_zero_probabilities(backend: Backend) -> None:
    p, q = backend.array(HARD_P, "float32"), backend.array(HARD_Q, "float32")
    np.testing.assert_allclose(
        backend.numpy(js_divergence(p, q, reduction="none")), [LOG_2, LOG_2 / 2, 0], rtol=1e-6
    )
    for temperature in (1.0, 0.25):
        rows = entropy(p, reduction="none", temperature=temperature)
        np.testing.assert_allclose(backend.numpy(rows), [0, LOG_2, 0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_zero_probabilities_do_not_change_the_other_gradients(
    autodiff: Backend, temperature: float
) -> None:
    p = autodiff.array([[math.log(0.3), math.log(0.7), -INF]], "float32")
    q = autodiff.array([[math.log(0.6), math.log(0.4), -INF]], "float32")
    for whole, without_zeros in zip(
        [
            *autodiff.gradients(js_divergence, p, q),
            *autodiff.gradients(lambda x: entropy(x, temperature=temperature), p),
        ],
        [
            *autodiff.gradients(js_divergence, p[:, :2], q[:, :2]),
            *autodiff.gradients(lambda x: entropy(x, temperature=temperature), p[:, :2]),
        ],
        strict=True,
    ):
        np.testing.assert_array_equal(whole[:, 2], 0)
        np.testing.assert_allclose(whole[:, :2], without_zeros, rtol=1e-5)


def test_js_gradient_with_a_zero_on_one_side(autodiff: Backend) -> None:
    p, q = autodiff.array(HARD_P, "float32"), autodiff.array(HARD_Q, "float32")
    for gradient, logs in zip(autodiff.gradients(js_divergence, p, q), (p, q), strict=True):
        assert np.all(np.isfinite(gradient))
        np.testing.assert_array_equal(gradient[np.isinf(autodiff.numpy(logs))], 0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_row_without_any_probability_gives_zero(autodiff: Backend, temperature: float) -> None:
    x = autodiff.array([[-INF, -INF]], "float32")
    assert autodiff.numpy(entropy(x, temperature=temperature)) == 0
    [gradient] = autodiff.gradients(lambda x: entropy(x, temperature=temperature), x)
    np.testing.assert_array_equal(gradient, [[0, 0]])


def test_one_class(autodiff: Backend) -> None:
    x = autodiff.array([[0.0], [0.0]], "float32")
    for normalize in (False, True):
        assert autodiff.numpy(entropy(x, normalize=normalize)) == 0
    [gradient] = autodiff.gradients(lambda x: entropy(x, normalize=True), x)
    np.testing.assert_array_equal(gradient, 0)
    assert autodiff.numpy(kl_divergence(x, x)) == 0
    assert autodiff.numpy(js_divergence(x, x)) == 0


def test_very_small_probabilities(backend: Backend) -> None:
    x = backend.array([[0.0, -1e4], [-1e-7, -16.118]], "float32")
    y = backend.array([[-1e4, 0.0], [-16.118, -1e-7]], "float32")
    rows = backend.numpy(js_divergence(x, y, reduction="none"))
    np.testing.assert_allclose(rows, LOG_2, rtol=3e-6)
    same = backend.numpy(js_divergence(x, x, reduction="none"))
    assert np.all((same >= 0) & (same < 1e-7))
    rows = backend.numpy(entropy(x, reduction="none"))
    np.testing.assert_allclose(rows, [0, 1e-7 + 16.118 * math.exp(-16.118)], rtol=1e-5)


@pytest.mark.parametrize("fn", [kl_divergence, js_divergence, entropy])
def test_nan_propagates_unless_masked(backend: Backend, fn: Any) -> None:
    bad = np.array(P)
    bad[1, 2] = np.nan
    count = 1 if fn is entropy else 2
    for place in range(count):
        clean = [backend.array(P, "float32"), backend.array(Q, "float32")][:count]
        x = list(clean)
        x[place] = backend.array(bad if place == 0 else np.where(np.isnan(bad), bad, Q), "float32")
        rows = backend.numpy(fn(*x, reduction="none"))
        np.testing.assert_array_equal(np.isnan(rows), [False, True, False, False])
        kept = backend.mask([True, False, True, True])
        expected = backend.numpy(fn(*clean, reduction="none"))[[0, 2, 3]].mean()
        np.testing.assert_allclose(backend.numpy(fn(*x, mask=kept)), expected, rtol=1e-6)


@pytest.mark.parametrize("limit", [100.0, None])
def test_nan_in_q_propagates_where_p_is_zero(backend: Backend, limit: float | None) -> None:
    p, q = backend.array([[0.0, -INF]]), backend.array([[0.0, np.nan]])
    assert np.isnan(backend.numpy(kl_divergence(p, q, max_log_ratio=limit)))


@pytest.mark.parametrize("fn", [kl_divergence, js_divergence, entropy])
def test_masked_rows_have_no_gradient(autodiff: Backend, fn: Any) -> None:
    poisoned = np.array(P)
    poisoned[1] = np.nan
    arrays = [autodiff.array(poisoned, "float32"), autodiff.array(Q, "float32")]
    arrays = arrays[: 1 if fn is entropy else 2]
    mask = autodiff.mask([True, False, True, True])
    for gradient in autodiff.gradients(lambda *x: fn(*x, mask=mask), *arrays):
        assert np.all(np.isfinite(gradient))
        np.testing.assert_array_equal(gradient[1], 0)
        assert np.all(gradient[[0, 2, 3]] != 0)
    all_false = autodiff.mask([False])
    for gradient in autodiff.gradients(lambda *x: fn(*x, mask=all_false), *arrays):
        np.testing.assert_array_equal(gradient, 0)
    assert autodiff.numpy(fn(*arrays, mask=all_false)) == 0


def test_axis_selects_the_classes(backend: Backend) -> None:
    p, q = distributions(2, 2, 3, 4), distributions(3, 2, 3, 4)
    turned_p, turned_q = (backend.array(np.moveaxis(x, -1, 1)) for x in (p, q))
    mask = backend.mask([[True, False, True]])
    for fn in (kl_divergence, js_divergence):
        expected = fn(backend.array(p), backend.array(q), reduction="none", mask=mask)
        assert expected.shape == (2, 3)
        for axis in (1, -2):
            value = fn(turned_p, turned_q, axis=axis, reduction="none", mask=mask)
            np.testing.assert_allclose(backend.numpy(value), backend.numpy(expected), rtol=1e-12)
    tempered: dict[str, Any] = {"temperature": 2.0, "reduction": "none"}
    np.testing.assert_allclose(
        backend.numpy(entropy(turned_p, axis=1, **tempered)),
        backend.numpy(entropy(backend.array(p), **tempered)),
        rtol=1e-12,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fn", [kl_divergence, js_divergence, entropy])
def test_half_precision(backend: Backend, fn: Any, dtype: str) -> None:
    """As exact as the inputs are: many classes summed in bfloat16 would be far off."""
    p, q = distributions(4, 2, 5000), distributions(5, 2, 5000)
    narrow = [backend.array(x, dtype) for x in (p, q)][: 1 if fn is entropy else 2]
    value = fn(*narrow)
    assert backend.dtype(value) == dtype
    exact = fn(*(np.asarray(backend.numpy(x)) for x in narrow))
    np.testing.assert_allclose(backend.numpy(value), exact, rtol=2**-8)


def test_the_result_has_the_wider_dtype(backend: Backend) -> None:
    p, q = backend.array(P, "bfloat16"), backend.array(Q, "float32")
    assert backend.dtype(kl_divergence(p, q)) == "float32"
    assert backend.dtype(kl_divergence(backend.array(P), q)) == "float64"


@pytest.mark.parametrize(
    ("fn", "options", "message"),
    [
        (
            kl_divergence,
            {"direction": "both"},
            "direction must be one of 'forward', 'reverse', 'symmetric', got 'both'",
        ),
        (kl_divergence, {"max_log_ratio": 0}, "max_log_ratio must be None or a finite number > 0"),
        (kl_divergence, {"axis": 2}, "axis must be an integer in [-2, 1] for an array of rank 2"),
        (kl_divergence, {"axis": True}, "axis must be an integer in [-2, 1]"),
        (js_divergence, {"axis": 1.0}, "axis must be an integer in [-2, 1]"),
        (js_divergence, {"reduction": "batchmean"}, "reduction must be one of"),
        (entropy, {"mode": "max"}, "mode must be one of 'penalty', 'bonus', got 'max'"),
        (entropy, {"temperature": 0.0}, "temperature must be a finite number > 0, got 0.0"),
        (entropy, {"temperature": -1}, "temperature must be a finite number > 0, got -1"),
        (entropy, {"normalize": 1}, "normalize must be True or False, got 1"),
    ],
)
def test_invalid_options(backend: Backend, fn: Any, options: dict[str, Any], message: str) -> None:
    arrays = [backend.array(P), backend.array(Q)][: 1 if fn is entropy else 2]
    with pytest.raises(InputError) as caught:
        fn(*arrays, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("fn", [kl_divergence, js_divergence, entropy])
def test_a_scalar_is_an_error(backend: Backend, fn: Any) -> None:
    x = backend.array(-1.0)
    with pytest.raises(InputError, match=r"at least one axis .* got shape \(\)"):
        fn(*[x] * (1 if fn is entropy else 2))
