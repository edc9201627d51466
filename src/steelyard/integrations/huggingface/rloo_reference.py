"""Keep the reference's log-probs of RLOO, which TRL computes for the reward and then drops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_reference(trainer: Any) -> None:
    """Let the batches of an `RLOOTrainer` have `ref_per_token_logps`, as GRPO's do.

    Its reference model is the last one that scores the completions, after the trained model; that
    happens only if `beta` is not 0.
    """
    score_completions = trainer._generate_and_score_completions  # noqa: SLF001 - no public name
    score_tokens = trainer._get_per_token_logps_and_entropies  # noqa: SLF001
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

    trainer._get_per_token_logps_and_entropies = recorded  # noqa: SLF001
    trainer._generate_and_score_completions = completed  # noqa: SLF001
