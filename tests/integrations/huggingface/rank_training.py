"""Train with real trainers in one of several processes, or alone; the processes import this."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from steelyard import RegularizerSpec
from steelyard.engine import tiny
from steelyard.integrations import CompositeLoss, term
from steelyard.penalties import from_logits
from steelyard.regularizers import Adaptive
from tests.whole_batch import whole

from .training import (
    FSDP,
    Collator,
    RegularizedTrainer,
    arguments,
    entropy,
    rows,
    shard_on_cpu,
    surprise,
)
from .trl_trainers import build

LENGTHS = [5, 9, 7, 3, 6, 8, 4, 10, 12, 3, 5, 6, 7, 7, 11, 4] * 8
STEPS = 3


def mean_square(data: Sequence[Mapping[str, Any]], logprobs: Sequence[Tensor]) -> Tensor:
    """Mean over the batch, then squared: not a mean over tokens, so one process evaluates it."""
    weights = torch.cat([datum["loss_fn_inputs"]["weights"] for datum in data])
    return ((weights * torch.cat(list(logprobs))).sum() / weights.sum()).square()


def size(parameters: Mapping[str, Tensor]) -> Tensor:
    total: Tensor = sum((p.square().sum() for p in parameters.values()), torch.zeros(()))
    return total


def terms() -> list[RegularizerSpec]:
    adaptive = Adaptive(regularizer=surprise, target=30.0, rate=0.5, clip=1.9)
    return [
        term(entropy, 0.1, "entropy"),
        RegularizerSpec(surprise, 0.01, "surprise"),
        RegularizerSpec(surprise, name="bounded", at_most=35.0),
        RegularizerSpec(adaptive, 0.001, "adaptive"),
        RegularizerSpec(mean_square, 0.01, "once", ranks="one"),
        term(size, 1e-3, "size"),
        term(from_logits.z_loss, 0.01, "z", inputs="projection"),
    ]


class Gradients(TrainerCallback):
    """Records the gradients of each step, whole."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.steps.append([whole(p.grad) for p in model.parameters()])


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
        shard_on_cpu()
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


def train_aggregated(
    folder: Path, reads: str, accumulation: int = 1, *, ranks: int = 1, fsdp: bool = False
) -> dict[str, Any]:
    """Train two steps with UPGrad on the gradients of the parameters."""
    model = tiny.build(torch.float64)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4 // ranks,
        "gradient_accumulation_steps": accumulation,
        "average_tokens_across_devices": True,
        "train_sampling_strategy": "sequential",
        "max_steps": 2,
        "ddp_find_unused_parameters": False,
    }
    if fsdp:
        settings |= {"fsdp": True, "fsdp_config": FSDP}
    args = arguments(folder, **settings)
    if fsdp:
        shard_on_cpu()
    options = {"wrt": model, "aggregate": "upgrad", "track_grad_norms": reads == "logits"}
    if reads == "logits":
        uncertain = term(entropy, 0.5, "uncertain")
    else:  # the model's own loss is computed without logits
        entropy_of_rows = from_logits.entropy
        uncertain = term(entropy_of_rows, 0.5, "uncertain", inputs=reads)
    trainer = RegularizedTrainer(
        model=model,
        args=args,
        train_dataset=rows(LENGTHS),
        data_collator=Collator(),
        terms=[uncertain, term(size, 1e-3, "size")],
        term_options=options,
    )
    trainer.train()
    assert trainer.is_fsdp_enabled == fsdp
    output = trainer.regularizers.composite.output
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    return {
        "parameters": [whole(p) for p in unwrapped.parameters()],
        "factors": output.factors,
        "norms": [output.base_loss.grad_norm]
        + [each.grad_norm for each in output.regularizers.values()],
        "cosines": output.cosines,
        "log": [row for row in trainer.state.log_history if "loss" in row],
    }


AGGREGATED = [
    (how, reads, accumulation)
    for how in ("ddp", "fsdp")
    for reads, accumulation in (("logits", 1), ("logits", 2), ("projection", 1))
]


def aggregated(ranks: int, folder: Path) -> dict[Any, Any]:
    found = {}
    for how, reads, accumulation in AGGREGATED:
        place = folder / f"aggregated-{how}-{reads}-{accumulation}"
        found[how, reads, accumulation] = train_aggregated(
            place, reads, accumulation, ranks=ranks, fsdp=how == "fsdp"
        )
        dist.barrier()
    return found


def by_token(completion_entropy: Tensor, completion_mask: Tensor) -> Tensor:
    return completion_entropy.sum() / completion_mask.sum()


def by_sequence(completion_entropy: Tensor, completion_mask: Tensor) -> Tensor:
    return (completion_entropy.sum(1) / completion_mask.sum(1)).mean()


def z_loss(completion_logits: Tensor) -> Tensor:
    return completion_logits.logsumexp(-1).square().mean()


def trl_terms(name: str) -> list[RegularizerSpec]:
    """GRPO counts its processes equally, so its terms are means over sequences."""
    if name == "GRPO":
        return [term(by_sequence, 0.3, "entropy")]
    return [term(by_token, 0.3, "entropy"), term(z_loss, 0.01, "z")]


def train_trl(
    name: str, folder: Path, accumulation: int, *, ranks: int = 1, fsdp: bool = False
) -> dict[str, Any]:
    """Train one step with a trainer of TRL; with the batches that its loss was computed on."""
    trainer = build(
        name,
        folder,
        accumulation,
        fsdp=fsdp,
        per_device_train_batch_size=8 // accumulation // ranks,
        terms=trl_terms(name),
    )
    gradients, batches = Gradients(), []
    trainer.add_callback(gradients)
    own = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append({k: v for k, v in inputs.items() if isinstance(v, Tensor)})
        return own(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    composite = trainer.regularizers.composite
    output = composite.output_across_ranks() if ranks > 1 else composite.output
    return {
        "log": [row for row in trainer.state.log_history if "loss" in row],
        "gradients": gradients.steps,
        "sharded": any(isinstance(p, DTensor) for p in model.parameters()),
        "batches": batches,
        "output": output.to_dict(),
    }


TRL_WAYS = [
    (name, how, accumulation)
    for name in ("SFT", "GRPO")
    for how in ("ddp", "fsdp")
    for accumulation in (1, 4)
]


def trl(_rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    found = {}
    for name, how, accumulation in TRL_WAYS:
        place = folder / f"{name}-{how}-{accumulation}"
        fsdp = how == "fsdp"
        found[name, how, accumulation] = train_trl(
            name, place, accumulation, ranks=ranks, fsdp=fsdp
        )
        dist.barrier()
    return found


def save_and_load(folder: Path) -> list[Any]:
    """State of a loss that accelerate saved, and of another that it loaded into."""
    losses = [CompositeLoss(lambda loss: loss, terms()[2:4]) for _ in range(2)]
    accelerator = Accelerator(cpu=True)
    accelerator.register_for_checkpointing(losses[0])
    row = torch.full((3,), -7.0, requires_grad=True)
    data = [{"loss_fn_inputs": {"weights": torch.ones(3)}}]
    losses[0](loss=row.sum(), data=data, logprobs=[row])
    accelerator.save_state(str(folder / "accelerate"))
    accelerator.wait_for_everyone()
    accelerator._custom_objects = [losses[1]]
    accelerator.load_state(str(folder / "accelerate"))
    return [loss.get_extra_state() for loss in losses]


def everything(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Train in all ways, in one of the processes."""
    found: dict[str, Any] = {}

    def run(name: str, *args: Any, **settings: Any) -> None:
        found[name] = train(folder / name.split(",", maxsplit=1)[0], *args, ranks=ranks, **settings)
        dist.barrier()

    run("ddp 1")
    run("ddp 4", 4)
    run("fsdp 1", fsdp=True)
    run("fsdp 4", 4, fsdp=True, checkpointing=True)
    run("bf16", fsdp=True, bf16=True, max_steps=2)
    run("half, first", 4, fsdp=True, max_steps=2, save_strategy="steps", save_steps=2)
    run("half, then", 4, fsdp=True, save_strategy="steps", save_steps=2, resume=True)
    found["aggregated"] = aggregated(ranks, folder)
    return {**found, "trl": trl(rank, ranks, folder), "accelerate": save_and_load(folder)}


def alone(accumulation: int, **settings: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return train(Path(folder), accumulation, **settings)
