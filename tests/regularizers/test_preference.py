from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from steelyard import Pipeline, RegularizerSpec
from steelyard.regularizers import DPO, ChosenNLL, SquaredLogRatio
from steelyard.spec.registry import lookup

from .checks import assert_gradients, doubles, plain, value_and_gradients

LOGPROBS = doubles([-0.5, -1.5], [-3.0], [-2.0], [-0.1, -0.2, -0.3])
REFERENCE = doubles([-1.0, -1.6], [-2.0], [-2.2], [-0.3, -0.2, -0.5])
DATA = [plain(reference_logprobs=row) for row in REFERENCE]


def rewards(rows: list[torch.Tensor]) -> Any:
    return np.array([(row - ref).sum() for row, ref in zip(rows, REFERENCE, strict=True)])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_by_hand(smoothing: float) -> None:
    term = DPO(beta=0.3, label_smoothing=smoothing)

    def by_hand(rows: list[torch.Tensor]) -> float:
        chosen, rejected = rewards(rows)[::2], rewards(rows)[1::2]
        h = 0.3 * (chosen - rejected)
        each = (1 - smoothing) * np.log1p(np.exp(-h)) + smoothing * np.log1p(np.exp(h))
        return float(each.mean())

    value, _ = value_and_gradients(term, DATA, LOGPROBS)
    assert value == pytest.approx(by_hand(LOGPROBS), rel=1e-12)
    assert_gradients(term, DATA, LOGPROBS, by_hand)


def test_metrics_of_dpo() -> None:
    # Rewards 0.6, -1.0, 0.2 and 0.4; halved by beta.
    _, metrics = DPO(beta=0.5).compute(DATA, LOGPROBS)
    assert metrics == pytest.approx(
        {"accuracy": 0.5, "margin": 0.35, "chosen_reward": 0.2, "rejected_reward": -0.15}
    )


def test_dpo_at_the_reference() -> None:
    value, gradients = value_and_gradients(DPO(beta=1.0), DATA, REFERENCE)
    assert value == pytest.approx(math.log(2))
    # sigmoid(0) / pairs, to the chosen and from the rejected.
    assert [row[0].item() for row in gradients] == pytest.approx([-0.25, 0.25, -0.25, 0.25])


def test_a_large_negative_margin_is_finite() -> None:
    value, gradients = value_and_gradients(DPO(beta=1.0), DATA[1:3], doubles([-9000.0], [-1.0]))
    assert value == pytest.approx(8999.2)
    assert all(bool(row.isfinite().all()) for row in gradients)


@pytest.mark.parametrize("term", [DPO(pair="pair"), ChosenNLL(pair="pair")])
def test_pairs_by_label_have_the_chosen_first(term: Any) -> None:
    order = [0, 2, 1, 3]
    data = [plain(reference_logprobs=REFERENCE[i], pair=i // 2) for i in order]
    rows = [LOGPROBS[i] for i in order]
    plain_term = type(term)()
    assert value_and_gradients(term, data, rows)[0] == pytest.approx(
        value_and_gradients(plain_term, DATA, LOGPROBS)[0]
    )


def test_chosen_nll() -> None:
    def by_hand(rows: list[torch.Tensor]) -> float:
        return -torch.cat([rows[0], rows[2]]).mean().item()

    assert value_and_gradients(ChosenNLL(), [], LOGPROBS)[0] == pytest.approx(4 / 3)
    assert_gradients(ChosenNLL(), [], LOGPROBS, by_hand)


def test_squared_log_ratio() -> None:
    def by_hand(rows: list[torch.Tensor]) -> float:
        return float(((torch.cat(rows) - torch.cat(REFERENCE)) ** 2).mean())

    value, _ = value_and_gradients(SquaredLogRatio(), DATA, LOGPROBS)
    assert value == pytest.approx(by_hand(LOGPROBS), rel=1e-12)
    assert_gradients(SquaredLogRatio(), DATA, LOGPROBS, by_hand)


def test_a_combined_objective_from_a_config_file() -> None:
    """DPO(0.1) + 0.1 · chosen NLL + 0.001 · mean squared log-ratio."""
    config: dict[str, Any] = {
        "loss": {"fn": "dpo", "options": {"beta": 0.1}},
        "regularizers": [
            {"fn": "chosen_nll", "weight": 0.1},
            {"fn": "squared_log_ratio", "weight": 0.001},
        ],
    }
    base = lookup(config["loss"]["fn"])(**config["loss"]["options"])
    specs = [RegularizerSpec.from_dict(entry) for entry in config["regularizers"]]
    output = Pipeline(base, specs).compute(DATA, LOGPROBS)
    expected = (
        DPO(beta=0.1).compute(DATA, LOGPROBS)[0]
        + 0.1 * ChosenNLL().compute(DATA, LOGPROBS)
        + 0.001 * SquaredLogRatio().compute(DATA, LOGPROBS)
    )
    assert output.loss_total == pytest.approx(expected.item())
    assert output.base_loss.custom["accuracy"] == 0.5
