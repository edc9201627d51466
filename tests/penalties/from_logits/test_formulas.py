"""Plain formulas: values by hand, gradients against autograd and finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from array_api_compat import numpy as xp

from steelyard.penalties.from_logits import _formulas
from steelyard.penalties.from_logits._components import (
    CROSS_ENTROPY,
    ENTROPY,
    FORWARD,
    JS,
    REVERSE,
    Z_LOSS,
    Component,
)
from tests.penalties.from_logits.cases import by_autograd, inputs

NAMES = {
    ENTROPY: "entropy",
    FORWARD: "forward",
    REVERSE: "reverse",
    JS: "js",
    Z_LOSS: "z_loss",
    CROSS_ENTROPY: "cross_entropy",
}
P, Q = np.array([[0.5, 0.5]]), np.array([[0.25, 0.75]])
LN2, LN3 = math.log(2), math.log(3)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (ENTROPY, LN2),
        (FORWARD, 0.5 * LN2 + 0.5 * (LN2 - LN3 + LN2 - LN2)),  # ½ ln(½ / ¼) + ½ ln(½ / ¾)
        (REVERSE, -0.25 * LN2 + 0.75 * (LN3 - LN2)),  # ¼ ln(¼ / ½) + ¾ ln(¾ / ½)
        (Z_LOSS, 0.0),  # logsumexp(log p) = 0
        (CROSS_ENTROPY, LN2),
    ],
)
def test_values_by_hand(kind: int, value: float) -> None:
    arrays = (np.log(P), np.log(Q), np.array([1]))
    component = Component(kind, 1.0)
    [rows] = _formulas.component_values(xp, [component], *arrays)
    [(again, _, _)] = _formulas.component_gradients(xp, [component], *arrays)
    np.testing.assert_allclose(rows, [value], atol=1e-15)
    np.testing.assert_allclose(again, [value], atol=1e-15)


def test_js_by_hand() -> None:
    """Of disjoint distributions it is log 2."""
    z, r = np.array([[0.0, -np.inf]]), np.array([[-np.inf, 0.0]])
    [rows] = _formulas.component_values(xp, [Component(JS, 1.0)], z, r, None)
    np.testing.assert_allclose(rows, [LN2])


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("hard", [False, True])
def test_gradients_against_autograd(kind: int, hard: bool) -> None:
    tensors = inputs(51, 6, 11, hard=hard)
    limit = 100.0 if kind in (FORWARD, REVERSE) else math.inf
    sign = -1.0 if kind == ENTROPY else 1.0  # the case is a bonus
    ones = torch.ones(6, dtype=torch.float64)
    _, gradients = by_autograd([NAMES[kind]], *tensors, ones, temperature=1.5)
    arrays = [x.numpy() for x in tensors]
    [(_, *found)] = _formulas.component_gradients(xp, [Component(kind, 1.5, limit)], *arrays)
    for own, wanted in zip(found, gradients[NAMES[kind]], strict=True):
        exact = sign * wanted.numpy()
        np.testing.assert_allclose(0 * exact if own is None else own, exact, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", NAMES)
def test_gradients_by_finite_differences(kind: int) -> None:
    logits, reference, targets = (x.numpy() for x in inputs(52, 2, 5))
    component = Component(kind, 0.8, 0.7 if kind in (FORWARD, REVERSE) else math.inf)

    def values(z: np.ndarray, r: np.ndarray) -> np.ndarray:
        [rows] = _formulas.component_values(xp, [component], z, r, targets)
        return np.asarray(rows)

    [(_, by_logits, by_reference)] = _formulas.component_gradients(
        xp, [component], logits, reference, targets
    )
    for k in range(5):
        step = 1e-6 * np.eye(5)[k]
        slope = (values(logits + step, reference) - values(logits - step, reference)) / 2e-6
        np.testing.assert_allclose(by_logits[:, k], slope, atol=1e-7)
        slope = (values(logits, reference + step) - values(logits, reference - step)) / 2e-6
        own = 0 * slope if by_reference is None else by_reference[:, k]
        np.testing.assert_allclose(own, slope, atol=1e-7)


def test_log_probabilities_are_shared_by_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    temperatures: list[float] = []
    exact = _formulas.finite_log_probs

    def counted(*args: object) -> object:
        temperatures.append(args[-1])  # type: ignore[arg-type]
        return exact(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(_formulas, "finite_log_probs", counted)
    components = [Component(ENTROPY, 1.0), Component(FORWARD, 1.0), Component(ENTROPY, 2.0)]
    _formulas.component_values(xp, components, np.log(P), np.log(Q), None)
    assert temperatures == [1.0, 1.0, 2.0]  # p, q, and p at the other temperature


def test_logsumexp_with_temperature() -> None:
    x = np.array([[0.0, 2 * math.log(3)], [-np.inf, -np.inf]])
    assert _formulas.log_sum(xp, x, 2.0).tolist() == [pytest.approx(math.log(4)), -np.inf]


@pytest.mark.parametrize(("classes", "rows"), [(1, 2**20), (1000, 1048), (2**21, 1), (0, 2**20)])
def test_rows_of_a_block(classes: int, rows: int) -> None:
    assert _formulas.block_rows(classes) == rows
