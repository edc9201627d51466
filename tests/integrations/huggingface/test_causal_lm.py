"""Logits, projection, log-probs and labels of a causal language model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelyard.engine import tiny
from steelyard.errors import InputError
from steelyard.integrations.huggingface.causal_lm import (
    Forward,
    data_of,
    logits_of,
    next_labels,
    output_layer,
    projection_of,
    record_forward,
    target_logprobs,
    token_count,
)
from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits.lm_head import Heard, overheard
from tests.integrations.huggingface.logit_free import model_with_capped_logits

LABELS = torch.tensor([[5, 6, -100, 7], [-100, 8, 9, -100]])


def inputs(*, labels: bool = True) -> dict[str, Tensor]:
    ids = torch.arange(8).reshape(2, 4)
    return {"input_ids": ids, **({"labels": LABELS} if labels else {})}


def recorded(model: Any) -> tuple[Forward, Any]:
    with record_forward(model, model) as forward:
        outputs = model(**inputs())
    return forward, outputs


def test_record_forward_keeps_the_last_pass_with_a_graph() -> None:
    model = tiny.build(torch.float32)
    with record_forward(model, model) as forward:
        outputs = model(**inputs())
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.long))
    assert forward.outputs is outputs
    assert forward.inputs.keys() == {"input_ids", "labels"}
    assert forward.backbone.last_hidden_state.shape == (2, 4, 64)
    logits = model.lm_head(forward.backbone.last_hidden_state)
    torch.testing.assert_close(logits, outputs.logits)
    assert not model._forward_hooks
    assert not model.base_model._forward_hooks


def test_output_layer_of_a_model_and_of_a_plain_module() -> None:
    model = tiny.build(torch.float32)
    assert output_layer(model) is model.lm_head
    assert output_layer(nn.Linear(2, 2)) is None


def test_logits_are_the_models_own_or_recomputed_from_the_backbone() -> None:
    model = tiny.build(torch.float32)
    forward, outputs = recorded(model)
    assert logits_of(model, forward) is outputs.logits
    forward.outputs = SimpleNamespace(loss=outputs.loss)  # as a fused head returns it
    calls: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(logits_of(model, forward), outputs.logits)
    assert calls == []  # the backbone did not run again
    assert "forward" not in vars(model.base_model)
    assert logits_of(model, Forward()) is None


def test_projection_stands_for_the_logits() -> None:
    model = tiny.build(torch.float32)
    with overheard(model.lm_head) as head:
        forward, outputs = recorded(model)
    found = projection_of(model, forward, head)
    assert found is not None
    torch.testing.assert_close(found.hidden @ found.weight.T, outputs.logits)
    # Behind a fused head, which does not call the output layer:
    forward.outputs = SimpleNamespace(loss=outputs.loss)
    fused = projection_of(model, forward, Heard(model.lm_head))
    assert fused is not None
    torch.testing.assert_close(fused.hidden, found.hidden)
    assert projection_of(model, Forward(), Heard(model.lm_head)) is None


def test_a_model_that_changes_its_logits_has_no_projection() -> None:
    model = model_with_capped_logits().train()
    with overheard(model.lm_head) as head:
        forward, _ = recorded(model)
    with pytest.raises(InputError, match="Gemma2ForCausalLM changes them after it: read logits"):
        projection_of(model, forward, head)


def test_log_probs_of_the_next_tokens_by_hand() -> None:
    logits = torch.randn(2, 4, 11, generator=torch.Generator().manual_seed(0))
    forward = Forward({"labels": LABELS})
    found = target_logprobs(forward, logits)
    assert found is not None
    logprobs = logits.log_softmax(-1)
    expected = [
        [logprobs[0, 0, 6], logprobs[0, 1, 0], logprobs[0, 2, 7]],
        [logprobs[1, 0, 8], logprobs[1, 1, 9], logprobs[1, 2, 0]],
    ]
    torch.testing.assert_close(torch.stack(found), torch.tensor(expected))
    projection = Projection(logits, torch.eye(11))
    from_projection = target_logprobs(forward, projection)
    assert from_projection is not None
    torch.testing.assert_close(torch.stack(from_projection), torch.tensor(expected))


def test_log_probs_of_a_fused_head_are_taken_as_they_are() -> None:
    fused = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    found = target_logprobs(Forward({}, SimpleNamespace(log_probs=fused)), None)
    assert found is not None
    assert [row.tolist() for row in found] == [[-1.0, -2.0], [-3.0, -4.0]]


def test_there_are_no_log_probs_without_logits_or_labels_that_fit() -> None:
    logits = torch.zeros(2, 4, 11)
    assert target_logprobs(Forward({"labels": LABELS}), None) is None
    assert target_logprobs(Forward({}), logits) is None
    assert target_logprobs(Forward({"labels": torch.tensor([0, 1])}), logits) is None


def test_data_give_ignored_labels_weight_zero() -> None:
    data = data_of(LABELS)
    assert [datum["loss_fn_inputs"]["target_tokens"].tolist() for datum in data] == [
        [6, -100, 7],
        [8, 9, -100],
    ]
    assert [datum["loss_fn_inputs"]["weights"].tolist() for datum in data] == [
        [1.0, 0.0, 1.0],
        [1.0, 1.0, 0.0],
    ]


def test_next_labels_are_shifted_by_one_position() -> None:
    found = next_labels({"labels": LABELS}, shifted=True)
    assert found is not None
    assert found.tolist() == [[6, -100, 7, -100], [8, 9, -100, -100]]
    assert next_labels({"labels": LABELS}, shifted=False) is LABELS
    other = torch.zeros(1, 1)
    assert next_labels({"labels": LABELS, "shift_labels": other}, shifted=True) is other
    assert next_labels({}, shifted=True) is None


def test_token_count_leaves_out_ignored_labels() -> None:
    shifted = token_count({"labels": LABELS}, shifted=True)
    plain = token_count({"labels": LABELS}, shifted=False)
    assert shifted is not None
    assert plain is not None
    assert (shifted.item(), plain.item()) == (4, 5)
    assert token_count({}, shifted=True) is None
