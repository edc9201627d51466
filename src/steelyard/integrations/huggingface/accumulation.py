"""Gradient accumulation: how much a micro-batch counts in its step, and the state of terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steelyard.composition.composite import CompositeLoss, Share
from steelyard.composition.ranks import mean_state
from steelyard.errors import InputError
from steelyard.integrations.huggingface.causal_lm import token_count
from steelyard.integrations.huggingface.internals import loss_shifts_labels


class MicroBatch(NamedTuple):
    """Part of a micro-batch in its optimizer step.

    Attributes:
        share: factor on the terms, so that they are scaled as the trainer's own loss is.
        divisor: number that the trainer divides the returned loss by.
    """

    share: Share
    divisor: int


def micro_batch_of(
    trainer: Any,
    batch: Mapping[str, Any],
    num_items_in_batch: Tensor | int | None,
    *,
    counts_items: bool = True,
) -> MicroBatch:
    """Ask a trainer how it scales the loss of a micro-batch.

    * It divides the loss by the number n of micro-batches: the terms are divided with it.
    * Its loss is divided by the tokens of the whole step already: the share is the micro-batch's
      fraction of these tokens.
    * It takes the loss for such a one, and the model ignores the number: the means of the
      micro-batches are added up, so that the share is 1.
    * Its loss is scaled in another way, and the batch has no labels (GRPO): the share is 1/n.

    Args:
        trainer: the trainer.
        batch: the micro-batch.
        num_items_in_batch: the tokens of the whole step, if the trainer counts them.
        counts_items: whether the loss is divided by that number; see `divides_by`.

    Raises:
        InputError: the loss is scaled, but by what cannot be determined.
    """
    steps: int = getattr(trainer, "current_gradient_accumulation_steps", 1)
    if not _is_scaled(trainer, num_items_in_batch):
        return MicroBatch(1.0, steps)
    tokens = token_count(batch, shifted=loss_shifts_labels(trainer))
    if num_items_in_batch is not None and not counts_items:
        share = torch.ones(())
    elif tokens is not None and num_items_in_batch is not None:
        # Where no token of the step counts, a trainer's loss is 0 or NaN; the terms are 0.
        share = tokens / torch.as_tensor(num_items_in_batch).clamp(min=1)
    else:
        return _without_items(trainer, steps, has_labels=tokens is not None)
    if trainer.args.average_tokens_across_devices:
        # The trainer counts the tokens of all processes, whose gradients are averaged: it
        # multiplies its loss by their number, and so the terms are.
        share = share * (trainer.accelerator.num_processes // trainer.get_tp_size())
    return MicroBatch(share, 1)


def _without_items(trainer: Any, steps: int, *, has_labels: bool) -> MicroBatch:
    if steps == 1 or (not has_labels and trainer.loss_is_scaled_for_ga):
        return MicroBatch(1.0 / steps, 1)
    raise InputError(
        f"{type(trainer).__name__} scales its loss for gradient accumulation by itself, and how "
        f"cannot be determined (loss_is_scaled_for_ga={trainer.loss_is_scaled_for_ga}, labels "
        f"{'without' if has_labels else 'and'} num_items_in_batch are missing): set "
        f"gradient_accumulation_steps=1, or let compute_loss return the mean of a batch and set "
        f"loss_is_scaled_for_ga=False."
    )


def divisor_of(num_items_in_batch: Tensor | int) -> Tensor:
    """The number of items as a tensor whose use in a loss can be found with `divides_by`."""
    return torch.as_tensor(num_items_in_batch).detach().float().requires_grad_()


def divides_by(loss: Tensor, divisor: Tensor) -> bool:
    """Whether a loss was computed with a number: whether its graph leads to that.

    transformers hands `num_items_in_batch` to every model that takes keyword arguments, and takes
    the loss for divided by it; models for sequence classification ignore it (5.22).
    """
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if getattr(node, "variable", None) is divisor:
            return True
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return False


def _is_scaled(trainer: Any, num_items_in_batch: Tensor | int | None) -> bool:
    """The rule of `Trainer.training_step`: whether the returned loss is not divided any more."""
    scaled: bool | None = trainer.loss_is_scaled_for_ga
    if scaled is None:
        counted = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        scaled = counted or trainer.compute_loss_func is not None
    return scaled


class StepState:
    """State of the terms of a composite over the micro-batches of an optimizer step.

    A term with state, such as `Adaptive`, updates it at each call. Under gradient accumulation each
    micro-batch therefore begins with the state from the beginning of the step, and the state after
    the step is the mean of theirs: for `Adaptive` and `EMADrift` the update by the mean value. A
    micro-batch in which a term had nothing to measure is not among them.

    Args:
        composite: the loss.
    """

    def __init__(self, composite: CompositeLoss) -> None:
        self._composite = composite
        self._before: Mapping[str, Any] | None = None
        self._after: list[tuple[float, Mapping[str, Any]]] = []

    def begin_micro_batch(self) -> None:
        """Restore the state from the beginning of the step; the first micro-batch records it."""
        if self._before is None:
            self._before = self._terms()
        elif self._before:
            self._set(self._before)

    def end_micro_batch(self) -> None:
        """Record the state after a micro-batch."""
        if self._before:
            unmeasured = {r.term.name for r in self._composite.results if not r.measured}
            states = self._terms().items()
            after = {name: None if name in unmeasured else state for name, state in states}
            self._after.append((1.0, after))

    def end_step(self) -> None:
        """Set the mean of the states after the micro-batches."""
        before = self._before or {}
        if len(self._after) > 1:
            means: Mapping[str, Any] = mean_state(self._after)
            self._set({k: before[k] if state is None else state for k, state in means.items()})
        self._before, self._after = None, []

    def _terms(self) -> Mapping[str, Any]:
        terms: Mapping[str, Any] = self._composite.get_extra_state()["terms"]
        return terms

    def _set(self, terms: Mapping[str, Any]) -> None:
        self._composite.set_extra_state({"step": self._composite.step, "terms": terms})
