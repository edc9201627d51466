"""The loss of a causal LM without logits: the same training, and its functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from steelyard.engine import tiny
from steelyard.integrations.huggingface.forward_capture import (
    LogitFreeLoss,
    labelled_rows,
    supports_logit_free_loss,
    without_logits,
)
from steelyard.penalties.from_logits import Projection
from steelyard.penalties.from_logits.lm_head import RecordedCall
from tests.integrations.huggingface.logit_free import (
    FEATURES,
    assert_alike,
    logit_terms,
    projection_terms,
    train,
)
from tests.integrations.huggingface.training import (
    Collator,
    assert_same_weights,
    rows,
)

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_training_without_logits(
    attached: bool, accumulation: int, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "attached": attached}
    model = tiny.build(torch.float32)
    if attached:  # and the user has set the default loss explicitly
        model.loss_function = ForCausalLMLoss
    ours, most = train(tmp_path, model, projection_terms(), **more)
    theirs, all_of_them = train(tmp_path, tiny.build(torch.float32), logit_terms(), **more)
    assert most <= FEATURES < all_of_them
    assert_alike(ours, theirs)
    assert ("_loss_function" in vars(model)) == attached
    assert model.loss_function is ForCausalLMLoss
    assert "forward" not in vars(model.lm_head)
    batch = {name: x.to(model.device) for name, x in Collator()(rows([6])).items()}
    assert model(**batch).logits.shape == (1, 6, tiny.VOCABULARY)


def test_tied_output_layer_with_tracked_norms(tmp_path: Path) -> None:
    found = []
    for terms in (projection_terms(), logit_terms()):
        model = tiny.build(torch.float32)
        model.lm_head.weight = model.model.embed_tokens.weight
        found.append(train(tmp_path, model, terms, max_steps=2, tracked=True)[0])
    assert_alike(*found)


def with_lora(target: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(tiny.build(torch.float32), LoraConfig(r=2, target_modules=[target]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize(("target", "logit_free"), [("q_proj", True), ("lm_head", False)])
def test_lora_on_the_body_and_on_the_output_layer(
    target: str, logit_free: bool, tmp_path: Path
) -> None:
    ours, most = train(tmp_path, with_lora(target), projection_terms())
    theirs, _ = train(tmp_path, with_lora(target), logit_terms())
    assert_alike(ours, theirs)
    assert (most <= FEATURES) == logit_free


def test_label_smoothing_is_kept(tmp_path: Path) -> None:
    more: dict[str, Any] = {"label_smoothing_factor": 0.1, "max_steps": 1}
    terms, others = projection_terms()[:2], logit_terms()[:2]
    ours, _ = train(tmp_path, tiny.build(torch.float32), terms, **more)
    theirs, _ = train(tmp_path, tiny.build(torch.float32), others, **more)
    assert_same_weights(ours.model, theirs.model)


# Its functions.


def test_labelled_rows_select_positions_with_a_label() -> None:
    projection = Projection(torch.arange(12.0).reshape(2, 3, 2), torch.zeros(4, 2))
    labels = torch.tensor([[7, 1, -100], [7, -100, 2]])
    found = labelled_rows(projection, {"labels": labels})
    assert found is not None
    assert found.targets.tolist() == [1, 2]
    assert found.projection.hidden.tolist() == [[0, 1], [8, 9]]
    aligned = labelled_rows(projection, {"shift_labels": labels})
    assert aligned is not None
    assert aligned.projection.shape == (4, 4)
    assert labelled_rows(projection, {}) is None
    assert labelled_rows(projection, {"labels": labels[:, 1:]}) is None


@pytest.mark.parametrize("retain_graph", [False, True])
@pytest.mark.parametrize("items", [None, 5, torch.tensor(5)])
def test_the_loss_equals_for_causal_lm_loss(items: Any, retain_graph: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(4, 9)
    hidden = torch.randn(2, 5, 4, generator=generator)
    labels = torch.randint(0, 9, (2, 5), generator=generator)
    labels[0, 2] = labels[1, 4] = -100
    placeholder = hidden[..., :1]
    loss = LogitFreeLoss(RecordedCall(layer, hidden, placeholder), retain_graph)
    found = loss(placeholder, labels, 9, items)
    torch.testing.assert_close(found, ForCausalLMLoss(layer(hidden), labels, 9, items))
    shifted = labels.roll(-1, 1)
    torch.testing.assert_close(
        loss(placeholder, labels, 9, items, shift_labels=shifted),
        ForCausalLMLoss(layer(hidden), labels, 9, items, shift_labels=shifted),
    )
    short = labels[:, 1:]
    for given in (
        (placeholder * 2, labels, 9),
        (placeholder, labels, 8),
        (placeholder, labels, 9, None, 0),
        (placeholder, short, 9),
    ):
        again = LogitFreeLoss(RecordedCall(layer, hidden, placeholder))
        again(*given)
        assert again.rows is None


def test_supported_models_and_output_layers() -> None:
    model = tiny.build(torch.float32)
    assert supports_logit_free_loss(model, model.lm_head)
    assert not supports_logit_free_loss(nn.Linear(2, 2), nn.Linear(2, 2))
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert not supports_logit_free_loss(model, model.lm_head)
    handle.remove()
    assert not supports_logit_free_loss(model, model.model.embed_tokens)
    model.loss_function = lambda *_, **__: None
    assert not supports_logit_free_loss(model, model.lm_head)


def test_the_models_loss_function_and_output_layer_are_restored() -> None:
    model = tiny.build(torch.float32)
    ids = torch.arange(6)[None]
    expected = model(ids, labels=ids)
    with without_logits(model, model.lm_head) as loss:
        outputs = model(ids, labels=ids)
    torch.testing.assert_close(outputs.loss, expected.loss)
    assert outputs.logits.shape == (1, 6, 1)  # the placeholder
    assert loss.rows is not None
    assert loss.rows.targets.tolist() == [1, 2, 3, 4, 5]
    assert model.loss_function is ForCausalLMLoss
    assert "_loss_function" not in vars(model)
    assert "forward" not in vars(model.lm_head)
