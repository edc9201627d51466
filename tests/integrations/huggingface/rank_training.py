"""Train with the real `Trainer` in one of several processes, or alone; the processes import this.

accelerate shards a model (FSDP2) on accelerators only, and on CPUs silently uses DDP. Its own code
works with gloo, so that `sharded` changes the one field that it decides by.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.integrations import term
from steelyard.regularizers import Adaptive

from .training import Collator, RegularizedTrainer, arguments, entropy, rows, surprise

LENGTHS = [5, 9, 7, 3, 6, 8, 4, 10, 12, 3, 5, 6, 7, 7, 11, 4] * 8
STEPS = 4
FSDP = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "state_dict_type": "SHARDED_STATE_DICT",
}


def mean_square(data: Sequence[Mapping[str, Any]], logprobs: Sequence[Tensor]) -> Tensor:
    """Mean over the batch, then squared: not a mean over tokens, so one process evaluates it."""
    weights = torch.cat([datum["loss_fn_inputs"]["weights"] for datum in data])
    return ((weights * torch.cat(list(logprobs))).sum() / weights.sum()).square()


def terms() -> list[RegularizerSpec]:
    adaptive = Adaptive(regularizer=surprise, target=30.0, rate=0.5, clip=1.9)
    return [
        term(entropy, 0.1, "entropy"),
        RegularizerSpec(surprise, 0.01, "surprise"),
        RegularizerSpec(surprise, name="bounded", at_most=35.0),
        RegularizerSpec(adaptive, 0.001, "adaptive"),
        RegularizerSpec(mean_square, 0.01, "once", ranks="one"),
    ]


class Gradients(TrainerCallback):
    """Records the gradients of each step, whole."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.steps.append([whole(p.grad) for p in model.parameters()])


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def train(
    folder: Path,
    accumulation: int = 1,
    *,
    ranks: int = 1,
    fsdp: bool = False,
    checkpointing: bool = False,
    resume: bool = False,
    **changed: Any,
) -> dict[str, Any]:
    """Train on the same rows, however many processes there are; see the keys of the result."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4 // ranks,
        "gradient_accumulation_steps": accumulation,
        "average_tokens_across_devices": True,
        "train_sampling_strategy": "sequential",
        "max_steps": STEPS,
        "ddp_find_unused_parameters": False,
        **changed,
    }
    if fsdp:
        config = {**FSDP, "activation_checkpointing": checkpointing}
        settings |= {"fsdp": True, "fsdp_config": config}
    args = arguments(folder, **settings)
    if fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    gradients = Gradients()
    trainer = RegularizedTrainer(
        model=tiny.build(torch.float32),
        args=args,
        train_dataset=rows(LENGTHS),
        data_collator=Collator(),
        callbacks=[gradients],
        terms=terms(),
    )
    trainer.train(resume_from_checkpoint=resume or None)
    assert trainer.is_fsdp_enabled == fsdp
    composite = trainer.regularizers.composite
    output = composite.output_across_ranks() if ranks > 1 else composite.output
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "log": [row for row in trainer.state.log_history if "loss" in row],
        "gradients": gradients.steps,
        "parameters": [whole(p) for p in model.parameters()],
        "sharded": any(isinstance(p, DTensor) for p in model.parameters()),
        "output": output.to_dict(),
        "state": composite.get_extra_state(),
    }


def everything(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Train in all ways, in one of the processes."""
    found: dict[str, Any] = {}

    def run(name: str, *args: Any, **settings: Any) -> None:
        found[name] = train(folder / name.split(",")[0], *args, ranks=ranks, **settings)
        dist.barrier()

    run("ddp 1")
    run("ddp 4", 4)
    run("fsdp 1", fsdp=True)
    run("fsdp 4", 4, fsdp=True, checkpointing=True)
    run("bf16", fsdp=True, bf16=True)
    run("half, first", 4, fsdp=True, max_steps=2, save_strategy="steps", save_steps=2)
    run("half, then", 4, fsdp=True, save_strategy="steps", save_steps=2, resume=True)
    return found


def alone(accumulation: int, **settings: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), accumulation, **settings)
