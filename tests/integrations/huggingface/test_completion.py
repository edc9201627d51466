"""The completion of a batch, from logits, from hidden states and from a fused head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.engine import tiny
from steelyard.errors import InputError
from steelyard.integrations.huggingface.causal_lm import Forward, record_forward
from steelyard.integrations.huggingface.completion import Completion
from steelyard.penalties.from_logits import Projection
from tests.integrations.huggingface.logit_free import model_with_capped_logits

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])
LABELS = torch.tensor([[-100, -100, 5, 6, 7], [-100, 9, 10, -100, -100]])
MASK = torch.tensor([[False, True, True, True], [True, True, False, False]])
T = 0.5


def passed(model: Any, *, logits: bool) -> tuple[Forward, Tensor]:
    """A forward pass with its logits, or as a fused head leaves it; and the rows that count."""
    with record_forward(model, model) as forward:
        outputs = model(input_ids=IDS)
    if not logits:
        forward.outputs = (outputs.logits.mean(),)
    return forward, outputs.logits[:, :-1][MASK]


def check(completion: Completion, rows: Tensor) -> None:
    logprobs = (rows / T).log_softmax(-1)
    ids = torch.tensor([5, 6, 7, 9, 10])
    assert completion.mask.tolist() == MASK.tolist()
    assert completion.targets.tolist() == ids.tolist()
    torch.testing.assert_close(completion.logits(), rows / T)
    picked = torch.zeros(MASK.shape).masked_scatter(MASK, logprobs.gather(-1, ids[:, None]))
    torch.testing.assert_close(completion.logprobs(), picked)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(
        completion.entropy(), torch.zeros(MASK.shape).masked_scatter(MASK, entropy)
    )


@pytest.mark.parametrize("logits", [True, False])
def test_from_logits_and_from_hidden_states(logits: bool) -> None:
    model = tiny.build(torch.float32)
    forward, rows = passed(model, logits=logits)
    completion = Completion(model, forward, LABELS, shifted=True, temperature=T)
    check(completion, rows)
    assert completion.positions.tolist() == nn.functional.pad(MASK, (0, 1)).tolist()
    if not logits:
        torch.testing.assert_close(completion.projection().logits(), rows / T)


def test_an_output_layer_with_a_bias_is_divided_by_the_temperature_too() -> None:
    model = tiny.build(torch.float32)
    model.lm_head.bias = nn.Parameter(torch.randn(tiny.VOCABULARY))
    forward, rows = passed(model, logits=False)
    completion = Completion(model, forward, LABELS, shifted=True, temperature=T)
    torch.testing.assert_close(completion.projection().logits(), rows / T)


@pytest.mark.parametrize("logits", [True, False])
def test_a_model_that_caps_its_logits_has_everything_but_a_projection(logits: bool) -> None:
    model = model_with_capped_logits().train()
    forward, rows = passed(model, logits=logits)
    completion = Completion(model, forward, LABELS, shifted=True, temperature=T)
    check(completion, rows)
    if not logits:
        with pytest.raises(InputError, match="changes them after it: read logits"):
            completion.projection()


def test_a_fused_head_gives_log_probs_and_entropy() -> None:
    width = 4
    values = -torch.arange(1.0, 9.0).reshape(2, width)
    virtual = torch.full((2, 3), 7.0)  # tokens that a prompt-learning adapter puts in front
    outputs = SimpleNamespace(log_probs=torch.cat([virtual, values], 1), entropy=-values)
    completion = Completion(None, Forward({}, outputs), LABELS, shifted=True)
    assert completion.logprobs().tolist() == [[0, -2, -3, -4], [-5, -6, 0, 0]]
    assert completion.entropy().tolist() == [[0, 2, 3, 4], [5, 6, 0, 0]]
    narrow = Completion(None, Forward({}, outputs), LABELS, shifted=True, width=2)
    assert narrow.logprobs().tolist() == [[-3, -4], [0, 0]]


def test_labels_that_are_aligned_with_the_positions() -> None:
    completion = Completion(None, Forward(), LABELS, shifted=False)
    assert completion.mask.tolist() == (LABELS != -100).tolist()
    assert completion.targets.tolist() == [5, 6, 7, 9, 10]


def test_rows_that_are_known_are_not_computed_again() -> None:
    rows = Projection(torch.eye(5), torch.randn(11, 5))
    completion = Completion(None, Forward(), LABELS, shifted=True, rows=rows)
    assert completion.projection() is rows
    torch.testing.assert_close(completion.logits(), rows.logits())
    expected = torch.zeros(MASK.shape).masked_scatter(
        MASK, rows.logits().log_softmax(-1).gather(-1, completion.targets[:, None])
    )
    torch.testing.assert_close(completion.logprobs(), expected)


def test_another_model_sees_the_same_tokens() -> None:
    model, other = tiny.build(torch.float32), model_with_capped_logits().train()
    forward, _ = passed(model, logits=True)
    theirs, rows = passed(other, logits=True)
    completion = Completion(model, forward, LABELS, shifted=True, temperature=T)
    check(completion.seen_by(other, theirs), rows)


def test_data_have_weights_and_the_log_probs_of_a_reference() -> None:
    completion = Completion(None, Forward(), LABELS, shifted=True)
    (first, second) = completion.data()
    assert first["loss_fn_inputs"]["target_tokens"].tolist() == [-100, 5, 6, 7]
    assert second["loss_fn_inputs"]["weights"].tolist() == [1, 1, 0, 0]
    assert first["loss_fn_inputs"].keys() == {"target_tokens", "weights"}
    reference = torch.arange(8.0).reshape(2, 4)
    (_, second) = completion.data(reference_logprobs=reference)
    assert second["loss_fn_inputs"]["reference_logprobs"].tolist() == [4, 5, 6, 7]


def test_a_model_without_output_layer_has_no_projection() -> None:
    completion = Completion(nn.Linear(1, 1), Forward(), LABELS, shifted=True)
    with pytest.raises(InputError, match="Linear has none: read hidden_states"):
        completion.projection()
