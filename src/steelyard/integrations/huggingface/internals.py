"""Parts of transformers and TRL without a public name; no other module here reads private ones.

Checked with transformers 5.22 and TRL 1.16; `tests/integrations/huggingface/test_internals.py`
notices when one of them changes.

* `Trainer._loss_shifts_labels` tells whether its loss compares a position with the label of the
  next one, and so which tokens it divides by. Without it the shares of micro-batches would be
  wrong by a token a row: an error.
* `PreTrainedModel._loss_function` holds what the setter of `loss_function` was given, and has no
  deleter. Without it the model keeps the loss that was set, which is the one it had.
* `_generate_and_score_completions` and `_get_per_token_logps_and_entropies` of `RLOOTrainer`
  compute the reference's log-probs for the reward, and drop them. Without them: an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from steelyard.errors import InputError


def loss_shifts_labels(trainer: Any) -> bool:
    """Return whether a trainer's loss compares a position with the label of the next one.

    Raises:
        InputError: the trainer does not say so.
    """
    shifted = getattr(trainer, "_loss_shifts_labels", None)
    if shifted is None:
        raise _unknown_version(trainer, "_loss_shifts_labels", "transformers 5.22")
    return bool(shifted)


@contextmanager
def loss_replaced(model: Any, loss: Callable[..., Any]) -> Iterator[None]:
    """Replace the loss function of a model of transformers until the block ends."""
    original, was_set = model.loss_function, "_loss_function" in vars(model)
    model.loss_function = loss
    try:
        yield
    finally:
        model.loss_function = original
        if not was_set:  # the setter has made the attribute, which would outlive a new `loss_type`
            vars(model).pop("_loss_function", None)


def keep_reference(trainer: Any) -> None:
    """Let the batches of an `RLOOTrainer` have `ref_per_token_logps`, as GRPO's do.

    Its reference model is the last one that scores the completions, after the trained model; that
    happens only if `beta` is not 0.

    Raises:
        InputError: the trainer computes them in another way.
    """
    names = ("_generate_and_score_completions", "_get_per_token_logps_and_entropies")
    for name in names:
        if not hasattr(trainer, name):
            raise _unknown_version(trainer, name, "TRL 1.16")
    score_completions, score_tokens = (getattr(trainer, name) for name in names)
    last: list[Tensor] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        scores = score_tokens(*args, **kwargs)
        if not torch.is_grad_enabled():
            last[:] = [scores[0]]
        return scores

    def completed(*args: Any, **kwargs: Any) -> Any:
        batch = score_completions(*args, **kwargs)
        if trainer.beta != 0.0:
            batch["ref_per_token_logps"] = last[0]
        return batch

    for name, replacement in zip(names, (completed, recorded), strict=True):
        setattr(trainer, name, replacement)


def _unknown_version(trainer: Any, name: str, known: str) -> InputError:
    return InputError(
        f"a trainer with terms must have {name}, as in {known}, got {type(trainer).__qualname__} "
        f"without it: install the version that the extra names, or report it to us."
    )
