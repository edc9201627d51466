"""Trainers of transformers and TRL: where each has its completion and its reference model.

A trainer is recognized by the class that defines its `compute_loss`, because that function decides
how the model is called. A subclass that overrides it is unknown, even if its parent is listed,
unless its class attribute `completion_like` names a trainer of the table.
Written for TRL 1.16; TRL is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from steelyard.errors import SpecError
from steelyard.integrations.huggingface.causal_lm import IGNORE_INDEX, Forward
from steelyard.integrations.huggingface.internals import keep_reference

# Labels of the positions of the model's input, `[B, T]`: -100 wherever the loss counts no token.
Labels: TypeAlias = Callable[[Any, Mapping[str, Any], Forward], Tensor | None]


@dataclass(frozen=True)
class TrainerKind:
    """Description of how one trainer runs its model.

    Attributes:
        labels: returns the labels of a batch; None if the trainer has no completion.
        width_of: the field of the batch that is as wide as the completion, with the completion in
            the last columns of the model's input; None if all columns may belong to it.
        has_temperature: whether its loss divides the logits by `trainer.temperature`.
        reference_model: returns the model that it compares the trained one with, in the same call
            of `compute_loss`; None if there is no such call.
        reference_field: the field of the batch with the reference's log-probs, `[B, width]`.
        keep_reference: changes a trainer that does not put that field into its batches.
        has_kl: whether its `beta` is the weight of a KL penalty to the reference.
        samples: whether its completions are sampled from the model that it trains.
        no_completion: why it has no completion.
        no_reference: when and why it has no reference.
    """

    labels: Labels | None = None
    width_of: str | None = None
    has_temperature: bool = False
    reference_model: Callable[[Any], nn.Module | None] | None = None
    reference_field: str | None = None
    keep_reference: Callable[[Any], None] | None = None
    has_kl: bool = False
    samples: bool = False
    no_completion: str = ""
    no_reference: str = "it runs no reference model"


def kind_of(compute_loss: Callable[..., Any], like: object = None) -> TrainerKind | None:
    """Look up the trainer whose own `compute_loss` this is; None if it is not in the table.

    Args:
        compute_loss: of a trainer.
        like: name of the trainer in the table that it is like, its `completion_like`; None if the
            function itself says so.

    Raises:
        SpecError: `like` is not in the table.
    """
    if like is not None:
        if like not in KINDS:
            raise SpecError(
                f"completion_like must name a trainer that Steelyard knows, got {like!r}; there "
                f"are: {', '.join(KINDS)}."
            )
        return KINDS[str(like)]
    defined = getattr(compute_loss, "__func__", compute_loss)
    package = getattr(defined, "__module__", "").partition(".")[0]
    owner, _, name = getattr(defined, "__qualname__", "").partition(".")
    if package not in ("transformers", "trl") or name != "compute_loss":
        return None
    return KINDS.get(owner)


def trainer_name(trainer: Any, kind: TrainerKind | None) -> str:
    """Name of a trainer in messages: of its class in the table, or of its own if it is unknown."""
    classes = type(trainer).__mro__ if kind is not None else ()
    return next((c.__name__ for c in classes if c.__name__ in KINDS), type(trainer).__name__)


def _of_the_batch(_trainer: Any, batch: Mapping[str, Any], _forward: Forward) -> Tensor | None:
    return batch.get("labels")


def given_to_the_model(_trainer: Any, _batch: Mapping[str, Any], forward: Forward) -> Tensor | None:
    """Labels that the trainer passed to the model."""
    return forward.inputs.get("labels")


def _without_tool_tokens(trainer: Any, batch: Mapping[str, Any], forward: Forward) -> Tensor | None:
    """Labels passed to the model, without the tokens that tools have written."""
    labels = given_to_the_model(trainer, batch, forward)
    if labels is None or "tool_mask" not in batch:
        return labels
    written = nn.functional.pad(
        batch["tool_mask"], (labels.shape[1] - batch["tool_mask"].shape[1], 0)
    )
    return labels.masked_fill(written == 0, IGNORE_INDEX)


def _chosen_and_rejected(trainer: Any, batch: Mapping[str, Any], _forward: Forward) -> Tensor:
    """Labels of the chosen and, below them, of the rejected answers, as the model gets them."""
    joined = trainer.concatenated_inputs(
        batch, is_encoder_decoder=trainer.is_encoder_decoder, device=trainer.accelerator.device
    )
    labels: Tensor = joined["concatenated_labels"]
    return labels


def _generated(_trainer: Any, batch: Mapping[str, Any], _forward: Forward) -> Tensor:
    """Tokens of the completion, behind those of the prompt; not those that tools have written."""
    written = batch["completion_mask"] * batch.get("tool_mask", 1)
    completion = batch["completion_ids"].masked_fill(written == 0, IGNORE_INDEX)
    return torch.cat([torch.full_like(batch["prompt_ids"], IGNORE_INDEX), completion], dim=1)


def _reference_or_model(trainer: Any) -> nn.Module:
    """Reference model; with PEFT it is the model itself, called with its adapter disabled."""
    reference: nn.Module = trainer.model if trainer.ref_model is None else trainer.ref_model
    return reference


def _teacher(trainer: Any) -> nn.Module:
    teacher: nn.Module = trainer.teacher_model
    return teacher


_TRAINER = TrainerKind(labels=_of_the_batch)
_PREFERENCE = TrainerKind(
    labels=given_to_the_model,
    reference_model=_reference_or_model,
    no_reference="it runs no reference model with precompute_ref_log_probs=True",
)
_PAIRS = TrainerKind(labels=_chosen_and_rejected)
_ONLINE = TrainerKind(
    labels=_without_tool_tokens,
    width_of="completion_ids",
    has_temperature=True,
    reference_field="ref_per_token_logps",
    has_kl=True,
    samples=True,
    no_reference=(
        "it runs its reference model only if beta is not 0, and keeps log-probs alone: set beta "
        "(1e-9 leaves out the trainer's own KL) and read reference_logprobs"
    ),
)
KINDS: Mapping[str, TrainerKind] = {
    "Trainer": _TRAINER,
    "SFTTrainer": _TRAINER,
    "DPOTrainer": _PREFERENCE,
    "KTOTrainer": _PREFERENCE,
    "GRPOTrainer": _ONLINE,
    "RLOOTrainer": replace(_ONLINE, keep_reference=keep_reference),
    "ORPOTrainer": _PAIRS,
    "CPOTrainer": _PAIRS,
    "GKDTrainer": TrainerKind(labels=_of_the_batch, reference_model=_teacher),
    "DistillationTrainer": TrainerKind(
        labels=_generated,
        width_of="completion_ids",
        has_temperature=True,
        samples=True,
        reference_model=_teacher,
    ),
    "RewardTrainer": TrainerKind(
        no_completion="it scores whole sequences: read logits, hidden_states or parameters"
    ),
}
