"""Logits, projection and labels of a forward pass of a causal language model."""

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
    logits_at,
    logits_of,
    next_labels,
    output_layer,
    projection_of,
    record_forward,
    token_count,
)
from steelyard.penalties.from_logits.lm_head import RecordedCall, record_call
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


def test_record_forward_can_keep_the_last_pass_without_a_graph() -> None:
    model = tiny.build(torch.float32)
    with record_forward(model, model, graph=False) as forward:
        assert not forward.ran
        model(**inputs())
        assert not forward.ran
        with torch.no_grad():
            outputs = model(**inputs(labels=False))
    assert forward.ran
    assert forward.outputs is outputs
    assert forward.inputs.keys() == {"input_ids"}


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


def test_logits_at_some_positions() -> None:
    model = tiny.build(torch.float32)
    forward, outputs = recorded(model)
    at = LABELS != -100
    assert torch.equal(logits_at(model, forward, at), outputs.logits[at])
    torch.testing.assert_close(
        logits_at(model, forward, at[:, 1:]), outputs.logits[:, 1:][at[:, 1:]]
    )
    forward.outputs = SimpleNamespace(loss=outputs.loss)  # as a fused head returns it
    shapes: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda _m, _a, made: shapes.append(made.shape))
    torch.testing.assert_close(logits_at(model, forward, at), outputs.logits[at])
    assert shapes == [torch.Size([1, 5, tiny.VOCABULARY])]  # five positions only


@pytest.mark.parametrize("logits", [None, torch.zeros(2, 4), torch.zeros(2, 3, 5)])
def test_without_logits_of_each_position_there_is_no_completion(logits: Any) -> None:
    forward = Forward({}, SimpleNamespace(logits=logits))
    message = r"needs a language model with logits \[B, T, V\], and Linear has none"
    with pytest.raises(InputError, match=message):
        logits_at(nn.Linear(1, 1), forward, LABELS != -100)


def test_projection_stands_for_the_logits() -> None:
    model = tiny.build(torch.float32)
    with record_call(model.lm_head) as head:
        forward, outputs = recorded(model)
    found = projection_of(model, forward, head)
    assert found is not None
    torch.testing.assert_close(found.hidden @ found.weight.T, outputs.logits)
    # Behind a fused head, which does not call the output layer:
    forward.outputs = SimpleNamespace(loss=outputs.loss)
    fused = projection_of(model, forward, RecordedCall(model.lm_head))
    assert fused is not None
    torch.testing.assert_close(fused.hidden, found.hidden)
    assert projection_of(model, Forward(), RecordedCall(model.lm_head)) is None


def test_a_model_that_changes_its_logits_has_no_projection() -> None:
    model = model_with_capped_logits().train()
    with record_call(model.lm_head) as head:
        forward, _ = recorded(model)
    with pytest.raises(InputError, match="Gemma2ForCausalLM changes them after it: read logits"):
        projection_of(model, forward, head)


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
