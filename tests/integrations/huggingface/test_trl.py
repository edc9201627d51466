"""Terms in TRL's real `SFTTrainer`, whose fused head builds no logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.integrations import term
from steelyard.integrations.huggingface import RegularizerMixin
from steelyard.penalties import from_logits


class RegularizedSFTTrainer(RegularizerMixin, SFTTrainer):
    pass


TEXTS = ["The beam is level.", "A weight slides.", "Two pounds of salt, and one of pepper.", "Yes."]


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    logprobs = logits[:, :-1].log_softmax(-1)[labels[:, 1:] != -100]
    return -(logprobs.exp() * logprobs).sum(-1).mean()


def surprise(data: Any, logprobs: Any) -> Tensor:
    weights = torch.cat([datum["loss_fn_inputs"]["weights"] for datum in data])
    return (weights * torch.cat(logprobs).square()).sum() / weights.sum()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "spread",
    [term(entropy, 0.3), term(from_logits.entropy, 0.3, inputs="projection")],
    ids=["logits", "projection"],
)
def test_sft_training_equals_the_same_by_hand(
    accumulation: int, spread: RegularizerSpec, tmp_path: Path
) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    trainer = RegularizedSFTTrainer(
        model=tiny.build(torch.float32),
        args=SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=2,
            logging_steps=1,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        terms=[spread, RegularizerSpec(surprise, 0.02, "surprise")],
    )
    trainer.train()

    model = tiny.build(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    ids = [
        row if row[-1] == tokenizer.eos_token_id else [*row, tokenizer.eos_token_id] for row in ids
    ]
    for step in range(2):
        rows = [model(torch.tensor([row])).logits[0, :-1].log_softmax(-1) for row in ids]
        picked = [
            row.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
            for row, tokens in zip(rows, ids, strict=True)
        ]
        every = torch.cat(rows)
        base = -torch.cat(picked).mean()
        wide = -(every.exp() * every).sum(-1).mean()
        square = torch.cat(picked).square().mean()
        optimizer.zero_grad()
        total: Tensor = base + 0.3 * wide + 0.02 * square
        total.backward()  # type: ignore[no-untyped-call]  # torch
        optimizer.step()
        log = trainer.state.log_history[step]
        assert log["loss"] == pytest.approx(total.item(), rel=1e-5)
        assert log["base_loss/value"] == pytest.approx(base.item(), rel=1e-5)
        assert log["regularizers/entropy/value"] == pytest.approx(wide.item(), rel=1e-5)
        assert log["regularizers/surprise/value"] == pytest.approx(square.item(), rel=1e-5)
    assert trainer.model is not None
    for ours, theirs in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
