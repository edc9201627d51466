"""Data, arguments and terms for training the tiny model with the real `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from steelyard.integrations.huggingface import RegularizerMixin

Batch = dict[str, Tensor]
FSDP = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "state_dict_type": "SHARDED_STATE_DICT",
}


def shard_on_cpu() -> None:
    """Let accelerate shard models here; call it between the arguments and the trainer.

    accelerate shards (FSDP2) on accelerators only, and silently uses DDP on CPUs. The rest of its
    code works with gloo: this changes the one field that it decides by.
    """
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


class RegularizedTrainer(RegularizerMixin, Trainer):
    pass


def rows(lengths: Sequence[int]) -> list[Batch]:
    numbers = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 256, (n,), generator=numbers) for n in lengths]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in drawn]


class Collator:
    """Pads with ignored labels, and records the batches."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, data: Sequence[Batch]) -> Batch:
        batch = {
            name: nn.utils.rnn.pad_sequence([d[name] for d in data], True, padding)
            for name, padding in (("input_ids", 256), ("labels", -100))
        }
        mask = [torch.ones(len(d["labels"]), dtype=torch.long) for d in data]
        batch["attention_mask"] = nn.utils.rnn.pad_sequence(mask, batch_first=True)
        self.batches.append(batch)
        return batch


def arguments(folder: Path, **changed: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),  # on a GPU by `make test-gpu`
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "average_tokens_across_devices": False,
        "logging_nan_inf_filter": True,
    }
    return TrainingArguments(str(folder), **(settings | changed))


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean entropy of the predictions at labelled positions."""
    logprobs = logits[:, :-1].log_softmax(-1)[labels[:, 1:] != -100]
    return -(logprobs.exp() * logprobs).sum(-1).mean()


def surprise(data: Sequence[Mapping[str, Any]], logprobs: Sequence[Tensor]) -> Tensor:
    """Mean square of the log-probs with weight 1; a term over `(data, logprobs)`."""
    weights = [datum["loss_fn_inputs"]["weights"] for datum in data]
    squares = [w * row.square() for w, row in zip(weights, logprobs, strict=True)]
    return torch.cat(squares).sum() / torch.cat(weights).sum()


def assert_same_weights(model: nn.Module | None, other: nn.Module | None) -> None:
    assert model is not None
    assert other is not None
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
