"""Training data of answers: alignment of targets, log-probs and advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker import types

from steelyard.composition.named_losses import NamedBaseLoss
from steelyard.experiment.data.files import Prompt
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.rewards.reward import Score
from steelyard.experiment.rollouts.answers import Answer, ScoredAnswer, add_base_logprobs, datum_of

PROMPT = Prompt(4, {"prompt": "abc", "level": 2}, [10, 11, 12], {"level": np.array([2])})


def scored(tokens: list[int], logprobs: list[float], advantage: float) -> ScoredAnswer:
    answer = Answer(PROMPT, 1, tokens, logprobs, "de", truncated=False)
    return ScoredAnswer(answer, {"r": Score(0.5)}, 0.5, advantage)


def test_fields_are_aligned_with_the_targets() -> None:
    datum = datum_of(scored([20, 21], [-0.5, -1.5], 2.0))
    assert datum.model_input.to_ints() == [10, 11, 12, 20]
    fields = {key: value.tolist() for key, value in datum.loss_fn_inputs.items()}
    assert fields == {
        "target_tokens": [11, 12, 20, 21],
        "weights": [0.0, 0.0, 1.0, 1.0],
        "logprobs": [0.0, 0.0, -0.5, -1.5],
        "advantages": [0.0, 0.0, 2.0, 2.0],
        "reward": [0.5],
        "group": [1],
        "level": [2],
    }
    assert datum.record == {"prompt": "abc", "level": 2, "completion": "de"}  # type: ignore[attr-defined]


def test_the_loss_reads_the_answer_alone() -> None:
    datum = datum_of(scored([20, 21], [-0.5, -1.5], 2.0))
    logprobs = torch.tensor([-9.0, -9.0, -0.25, -2.0], requires_grad=True)
    loss = NamedBaseLoss.of("importance_sampling").compute([datum], [logprobs])
    expected = -2.0 * (np.exp(0.25) + np.exp(-0.5))
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert gradient[:2].tolist() == [0.0, 0.0]


def test_base_log_probs_stay_those_of_the_base_model(backend: Backend) -> None:
    data = [datum_of(scored([20, 21], [-0.5, -1.5], 2.0))]
    before = backend.logprobs(data)[0]
    backend.client.forward_backward(data, "importance_sampling").result()
    backend.client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    (datum,) = add_base_logprobs(data, backend)
    assert datum.loss_fn_inputs["reference_logprobs"].tolist() == pytest.approx(
        before.tolist(), abs=1e-6
    )
    assert backend.logprobs(data)[0].tolist() != pytest.approx(before.tolist(), abs=1e-6)
    assert datum.record == data[0].record  # type: ignore[attr-defined]
