"""Cross-entropy as the base loss."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from steelyard.composition.named_losses import NamedBaseLoss
from steelyard.engine import LocalServiceClient
from steelyard.errors import InputError, SpecError
from steelyard.experiment.config.schema import POLICY_LOSSES
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.training.base_losses import CrossEntropy, PolicyLoss


def test_cross_entropy_is_a_mean_over_weights_or_a_sum() -> None:
    data = [{"loss_fn_inputs": {"weights": [0.0, 2.0]}}, {"loss_fn_inputs": {}}]
    logprobs = [torch.tensor([-5.0, -1.0]), torch.tensor([-3.0])]
    mean, metrics = CrossEntropy().compute(data, logprobs)
    assert mean == pytest.approx(5 / 3)
    assert metrics == {"nll": pytest.approx(5 / 3), "tokens": 3.0}
    total, _ = CrossEntropy(reduction="sum").compute(data, logprobs)
    assert total == 5


def test_cross_entropy_equals_that_of_the_engine(plain: Encoder) -> None:
    client = LocalServiceClient().create_lora_training_client("tiny-random", rank=2, seed=0)
    line = json.loads('{"prompt": "one two", "completion": " three"}')
    data = plain.encode("completion", line)
    output = client.forward(data, "cross_entropy").result()
    logprobs = [row["logprobs"].to_torch() for row in output.loss_fn_outputs]
    loss, _ = CrossEntropy(reduction="sum").compute(data, logprobs)
    assert loss.item() == pytest.approx(output.metrics["loss:sum"], rel=1e-6)


def test_missing_weights_are_one_and_no_weight_is_no_loss() -> None:
    row = torch.tensor([-1.0, -3.0])
    assert CrossEntropy().compute([{"loss_fn_inputs": {}}], row)[0] == 2
    zeros = [{"loss_fn_inputs": {"weights": [0.0, 0.0]}}]
    loss, metrics = CrossEntropy().compute(zeros, [row])
    assert loss == 0
    assert metrics == {"nll": 0.0, "tokens": 0.0}


def test_invalid_reductions_and_weights_are_refused() -> None:
    with pytest.raises(SpecError, match=r"^reduction must be 'mean' or 'sum', got 'max'\.$"):
        CrossEntropy(reduction="max")  # type: ignore[arg-type]
    data = [{"loss_fn_inputs": {"weights": [1.0]}}]
    with pytest.raises(InputError, match=r"shape of the log-probs, \[2\], got \[1\]\.$"):
        CrossEntropy().compute(data, [torch.zeros(2)])


def policy_data() -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    fields = {"logprobs": [0.0, -1.0, -2.0], "advantages": [0.0, 1.0, 1.0], "weights": [0, 1, 1]}
    return [{"loss_fn_inputs": fields}], [torch.tensor([-9.0, -0.5, -2.0])]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_is_the_named_one_or_its_mean(name: str) -> None:
    data, logprobs = policy_data()
    expected = NamedBaseLoss.of(name).compute(data, logprobs)
    loss, metrics = PolicyLoss.of(name, {"reduction": "sum"}).compute(data, logprobs)
    assert loss == expected
    ratio = math.exp(0.25) if name == "gspo" else (math.exp(0.5) + 1) / 2
    assert metrics["ratio"] == pytest.approx(ratio)
    mean, _ = PolicyLoss.of(name).compute(data, logprobs)
    assert mean == pytest.approx(expected / 2)


def test_clipped_tokens_of_the_answer_are_counted() -> None:
    data, logprobs = policy_data()
    _, metrics = PolicyLoss.of("ppo").compute(data, logprobs)
    assert metrics["clip_fraction"] == 0.5  # the token of the prompt does not count
    wide = {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}
    assert PolicyLoss.of("ppo", wide).compute(data, logprobs)[1]["clip_fraction"] == 0
    assert "clip_fraction" not in PolicyLoss.of("importance_sampling").compute(data, logprobs)[1]


def test_settings_of_a_policy_loss_are_checked() -> None:
    with pytest.raises(SpecError, match=r"^options of ppo may hold .*, got the key 'clip'\.$"):
        PolicyLoss.of("ppo", {"clip": 0.2})
    with pytest.raises(SpecError, match=r"^reduction must be 'mean' or 'sum', got 'max'\.$"):
        PolicyLoss.of("ppo", {"reduction": "max"})
