"""Sequence classification under accumulation: the term is scaled as the loss is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from steelyard.integrations import term
from tests.integrations.huggingface.training import RegularizedTrainer, arguments

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_labels": 3,
}


def llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0)
    return transformers.LlamaForSequenceClassification(config)  # type: ignore[no-untyped-call]


def bert() -> Any:
    config = transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-untyped-call]


def sharpness(logits: Tensor) -> Tensor:
    return logits.square().mean()


def gradient(
    kind: Any, folder: Path, accumulation: int, weight: float, *, divided: bool = False
) -> tuple[Tensor, dict[str, float]]:
    """Gradient of one step on four rows; with its log."""
    torch.manual_seed(0)
    model = kind()
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (4, 6), generator=draw)
    labels = torch.tensor([0, 2, 1, 1])
    trainer = RegularizedTrainer(
        model=model,
        args=arguments(
            folder,
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            learning_rate=1.0,
        ),
        train_dataset=[{"input_ids": x, "labels": y} for x, y in zip(ids, labels, strict=True)],
        terms=[term(sharpness, weight, "sharpness")],
    )
    if divided:
        trainer.model_accepts_loss_kwargs = False
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    trainer.train()
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    return before - after, trainer.state.log_history[0]


@pytest.mark.parametrize("kind", [llama, bert])
@pytest.mark.parametrize("divided", [False, True])
def test_a_term_is_to_the_loss_as_in_one_batch(kind: Any, divided: bool, tmp_path: Path) -> None:
    """transformers adds up the means of micro-batches where a model ignores the number of items.

    The sum is four times the gradient of one batch, of the loss and of the term alike.
    """
    own, _ = gradient(kind, tmp_path, 1, 0.0, divided=divided)
    whole, expected = gradient(kind, tmp_path, 1, 0.7, divided=divided)
    plain, _ = gradient(kind, tmp_path, 4, 0.0, divided=divided)
    found, log = gradient(kind, tmp_path, 4, 0.7, divided=divided)
    times = 1 if divided else 4
    torch.testing.assert_close(plain, times * own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found - plain, times * (whole - own), rtol=1e-4, atol=1e-5)
    value = "regularizers/sharpness/value"
    assert log[value] == pytest.approx(expected[value], rel=1e-5)
    added = log["base_loss/value"] + log["regularizers/sharpness/contribution"]
    assert added == pytest.approx(log["loss"], rel=1e-5)
