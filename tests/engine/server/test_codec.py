from __future__ import annotations

from typing import Any

import pytest
import tinker
import torch
from tinker import types

from steelyard.engine import LocalServiceClient

from .comparison import assert_alike, to_plain


def test_sparse_tensors_of_the_sdk_are_decoded(
    training: tinker.TrainingClient, local: LocalServiceClient
) -> None:
    mine = local.create_lora_training_client("tiny-random", rank=4, seed=0)
    targets = torch.randint(1, 512, (6, 8))
    weights = torch.zeros(6, 8)
    weights[2, 1], weights[4, 7] = 0.5, -1.5
    inputs: Any = {"target_tokens": targets, "weights": weights}
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints([1, 2, 3, 4, 5, 6]), loss_fn_inputs=inputs
        )
    ]
    assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None, "the SDK packs them"
    for client in (training, mine):
        result = client.forward_backward(data, "cross_entropy").result()
        if client is training:
            served = result
    assert_alike(to_plain(served), to_plain(result))
    logprobs = result.loss_fn_outputs[0]["logprobs"].to_torch()
    by_hand = -(0.5 * logprobs[2, 1] - 1.5 * logprobs[4, 7]).item()
    assert served.metrics["loss:sum"] == pytest.approx(by_hand, abs=1e-5)
