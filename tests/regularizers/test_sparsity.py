from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from steelyard.regularizers import L1, L2, ElasticNet

from .checks import assert_gradients, doubles, plain, value_and_gradients

LOGPROBS = doubles([-0.5, -1.5], [-3.0])
CLASSES = doubles([[-0.5, -1.5], [-0.1, -4.0]])


def flat(logprobs: list[torch.Tensor], of: str) -> Any:
    x = np.concatenate([row.numpy().reshape(-1) for row in logprobs])
    return np.exp(x) if of == "probs" else x


FORMULAS: list[tuple[Any, Any]] = [
    (L1, abs),
    (L2, lambda x: x**2),
    (ElasticNet, lambda x: 0.5 * abs(x) + 0.5 * x**2),
]


@pytest.mark.parametrize(("cls", "formula"), FORMULAS)
@pytest.mark.parametrize("of", ["logprobs", "probs"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("logprobs", [LOGPROBS, CLASSES], ids=["tokens", "classes"])
def test_value_and_gradient(cls: Any, formula: Any, of: str, reduction: str, logprobs: Any) -> None:
    term = cls(of=of, reduction=reduction)

    def by_hand(rows: list[torch.Tensor]) -> float:
        return float(getattr(np, reduction)(formula(flat(rows, of))))

    value, _ = value_and_gradients(term, [], logprobs)
    assert value == pytest.approx(by_hand(logprobs), rel=1e-12)
    assert_gradients(term, [], logprobs, by_hand)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("of", ["logprobs", "probs"])
def test_l1_reports_its_sum_and_its_mean(of: Any, reduction: Any) -> None:
    _, metrics = L1(of=of, reduction=reduction).compute([], LOGPROBS)
    x = np.abs(flat(LOGPROBS, of))
    assert metrics == {
        "l1_total": pytest.approx(x.sum(), rel=1e-12),
        "l1_mean": pytest.approx(x.mean(), rel=1e-12),
    }


def test_l1_of_log_probs_is_the_negative_log_likelihood() -> None:
    value, (first, second) = value_and_gradients(L1(), [], LOGPROBS)
    assert value == pytest.approx(5.0 / 3)
    assert first.tolist() == second.tolist() * 2 == [-1 / 3, -1 / 3]


def test_centre_and_clip() -> None:
    # Mean -5/3, distances 7/6, 1/6 and -4/3, of which two are clipped to 1.
    term = L2(center="mean", clip=1.0)
    value, _ = value_and_gradients(term, [], LOGPROBS)
    assert value == pytest.approx((1 + (1 / 6) ** 2 + 1) / 3)
    assert L2(center=-1.0).compute([], LOGPROBS).item() == pytest.approx((0.25 + 0.25 + 4) / 3)


def test_the_centre_is_the_mean_of_unmasked_tokens() -> None:
    data = [plain(weights=[1.0, 0.0, 1.0])]
    value, _ = value_and_gradients(L2(center="mean"), data, doubles([-1.0, -99.0, -3.0]))
    assert value == pytest.approx(1.0)


def test_infinity_propagates() -> None:
    assert L2().compute([], [torch.tensor([-math.inf])]).item() == math.inf
