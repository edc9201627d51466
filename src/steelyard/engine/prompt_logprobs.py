"""Log-probs that a sampling call may request beside its samples: those of the prompt.

They are all those of `softmax(z)`, whatever the temperature of the samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker import types
from tinker.types.topk_logprobs import MASK_LOGPROB, TopkLogprobs
from torch import Tensor


@dataclass(frozen=True)
class RequestedLogprobs:
    """Log-probs that a sampling call requests beside the samples and their own.

    Attributes:
        prompt_logprobs: whether the log-probs of the prompt's own tokens are requested.
        last_n: limits them to the last n tokens; None: all.
        topk_prompt: number of the likeliest tokens at each position of the prompt.
        topk_sample: number of the likeliest tokens at each position of a sample.
        targets: chosen tokens at each position of the prompt, `[T - 1, K]`, -1 for none.
        alternatives: number of tokens drawn at each position of the prompt.
    """

    prompt_logprobs: bool = False
    last_n: int | None = None
    topk_prompt: int = 0
    topk_sample: int = 0
    targets: Tensor | None = None
    alternatives: int = 0

    @property
    def whole_prompt(self) -> bool:
        """True if the logits at every position of the prompt are needed, not at the last alone."""
        return bool(
            self.prompt_logprobs
            or self.topk_prompt
            or self.alternatives
            or self.targets is not None
        )


def prompt_fields(
    prompt: Tensor, logits: Tensor, requested: RequestedLogprobs, temperature: float, seed: int
) -> dict[str, Any]:
    """Fields of a response that are about its prompt.

    Args:
        prompt: its tokens, `[T]`.
        logits: its logits, `[T, V]`, on the CPU.
        requested: the fields.
        temperature: of the alternatives.
        seed: of the alternatives.
    """
    logprobs = logits.log_softmax(-1)
    fields: dict[str, Any] = {}
    if requested.prompt_logprobs:
        fields["prompt_logprobs_np"] = prompt_logprobs(prompt, logprobs, requested.last_n)
    if requested.topk_prompt:
        shape = (len(prompt), requested.topk_prompt)
        first = _first_index(prompt, requested.last_n)
        values, ids = logprobs[first - 1 : -1].topk(requested.topk_prompt)
        top = TopkLogprobs(np.zeros(shape, np.int32), np.full(shape, MASK_LOGPROB, np.float32))
        top.token_ids[first:], top.logprobs[first:] = ids.numpy(), values.numpy()
        fields["topk_prompt_logprobs_np"] = top
    if requested.targets is not None:
        is_token = requested.targets >= 0
        found = logprobs[:-1].gather(-1, requested.targets.clamp_min(0))
        values = torch.where(is_token, found, torch.zeros_like(found))
        fields["target_prompt_logprobs"] = types.TensorData.from_torch(values.float())
    if requested.alternatives:
        ids = _alternatives(logits[:-1], requested.alternatives, temperature, seed)
        fields["prompt_alt_tokens"] = types.PromptAltTokens(
            tokens=types.TensorData.from_torch(ids),
            logprobs=types.TensorData.from_torch(logprobs[:-1].gather(-1, ids).float()),
        )
    return fields


def prompt_logprobs(
    prompt: Tensor, logprobs: Tensor, last_n: int | None
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Log-prob of each token of a prompt; NaN for the first, and for all before the last n.

    Args:
        prompt: its tokens, `[T]`.
        logprobs: of all tokens at each of its positions, `[T, V]`.
        last_n: the number of tokens with a log-prob; None: all.
    """
    found = np.full(len(prompt), np.nan, dtype=np.float32)
    first = _first_index(prompt, last_n)
    found[first:] = logprobs[:-1].gather(-1, prompt[1:, None])[first - 1 :, 0].numpy()
    return found


def _alternatives(logits: Tensor, number: int, temperature: float, seed: int) -> Tensor:
    """Tokens `[T, number]` drawn with replacement at each position, by the temperature alone."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand(-1, number)
    shifted = logits.double() - logits.amax(-1, keepdim=True)
    probs = (shifted / temperature).softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(probs, number, replacement=True, generator=generator)


def _first_index(prompt: Tensor, last_n: int | None) -> int:
    """Index of the first token with a log-prob: never 0, which has no context to predict it."""
    return 1 if last_n is None else max(1, len(prompt) - last_n)
