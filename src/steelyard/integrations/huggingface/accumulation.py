"""Gradient accumulation: how much a micro-batch counts in its optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.composition import Share
from steelyard.errors import InputError
from steelyard.integrations.huggingface.causal_lm import token_count


class MicroBatch(NamedTuple):
    """Part of a micro-batch in its optimizer step.

    Attributes:
        share: factor on the terms, so that they are scaled as the trainer's own loss is.
        divisor: number that the trainer divides the returned loss by.
    """

    share: Share
    divisor: int


def micro_batch_of(
    trainer: Any, batch: Mapping[str, Any], num_items_in_batch: Tensor | int | None
) -> MicroBatch:
    """Ask a trainer how it scales the loss of a micro-batch.

    * It divides the loss by the number n of micro-batches: the terms are divided with it.
    * Its loss is divided by the tokens of the whole step already: the share is the micro-batch's
      fraction of these tokens.
    * Its loss is scaled in another way, and the batch has no labels (GRPO): the share is 1/n.

    Raises:
        InputError: the loss is scaled, but by what cannot be determined.
    """
    steps: int = getattr(trainer, "current_gradient_accumulation_steps", 1)
    if not _is_scaled(trainer, num_items_in_batch):
        return MicroBatch(1.0, steps)
    shifted: bool = trainer._loss_shifts_labels  # noqa: SLF001 - the trainer has no public name
    tokens = token_count(batch, shifted=shifted)
    if tokens is not None and num_items_in_batch is not None:
        # Where no token of the step counts, a trainer's loss is 0 or NaN; the terms are 0.
        share: Tensor = tokens / torch.as_tensor(num_items_in_batch).clamp(min=1)
        if trainer.args.average_tokens_across_devices:
            # The trainer counts the tokens of all processes, whose gradients are averaged: it
            # multiplies its loss by their number, and so the terms are.
            share = share * (trainer.accelerator.num_processes // trainer.get_tp_size())
        return MicroBatch(share, 1)
    if steps == 1 or (tokens is None and trainer.loss_is_scaled_for_ga):
        return MicroBatch(1.0 / steps, 1)
    raise InputError(
        f"{type(trainer).__name__} scales its loss for gradient accumulation by itself, and how "
        f"cannot be determined (loss_is_scaled_for_ga={trainer.loss_is_scaled_for_ga}, labels "
        f"{'without' if tokens is not None else 'and'} num_items_in_batch are missing): set "
        f"gradient_accumulation_steps=1, or let compute_loss return the mean of a batch and set "
        f"loss_is_scaled_for_ga=False."
    )


def _is_scaled(trainer: Any, num_items_in_batch: Tensor | int | None) -> bool:
    """The rule of `Trainer.training_step`: whether the returned loss is not divided any more."""
    scaled: bool | None = trainer.loss_is_scaled_for_ga
    if scaled is None:
        counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        scaled = counted or trainer.compute_loss_func is not None
    return scaled
