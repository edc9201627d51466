"""Hugging Face's `Trainer` with three regularizers: a tiny Llama learns a sentence.

Run it with `python examples/hf_trainer.py`; it needs `steelyard[engine,hf]` and takes seconds.
"""

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from steelyard import RegularizerSpec, penalties, schedules
from steelyard.engine import tiny
from steelyard.integrations import term
from steelyard.integrations.huggingface import RegularizerMixin
from steelyard.regularizers import L2


class RegularizedTrainer(RegularizerMixin, Trainer):
    """The class that replaces `Trainer` in a training script."""


def confidence(logits: Tensor) -> Any:
    """Minus the entropy over the vocabulary: a positive weight keeps the model uncertain."""
    return penalties.entropy(logits.log_softmax(-1), mode="bonus")


def drift(parameters: Mapping[str, Tensor]) -> Any:
    return penalties.l2(parameters["lm_head.weight"], reduction="mean")


def main() -> None:
    tokens = torch.tensor(tiny.tokenizer()("the beam is level")["input_ids"])
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    with tempfile.TemporaryDirectory() as folder:
        trainer = RegularizedTrainer(
            model=tiny.build(torch.float32),
            args=TrainingArguments(
                folder,
                max_steps=15,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                learning_rate=3e-3,
                logging_steps=5,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=data,
            terms=[
                term(confidence, schedules.linear(0.0, 0.05, steps=10), "confidence"),
                term(drift, 0.1, "drift"),
                RegularizerSpec(L2(), 0.01, "l2"),  # a ready-made regularizer over (data, logprobs)
            ],
        )
        trainer.train()
    print("step  loss   = base   + confidence + drift  + l2")
    for log in trainer.state.log_history:
        if "base_loss/value" in log:
            parts = [
                log[f"regularizers/{name}/contribution"] for name in ("confidence", "drift", "l2")
            ]
            numbers = "   ".join(f"{part:+.4f}" for part in parts)
            print(f"{log['step']:4d}  {log['loss']:.4f}  {log['base_loss/value']:.4f}  {numbers}")


if __name__ == "__main__":
    main()
