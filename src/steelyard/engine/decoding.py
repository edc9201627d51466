"""Decoding of several sequences at once: a key-value cache whose rows join and leave at any token.

Rows have lengths of their own. They are aligned at the right, since the next token of every row is
written to the same slot; the slots left of a shorter row are padding, which the mask hides:

    slot     0  1  2  3  4
    row 0    a  b  c  d  e      positions 0 1 2 3 4
    row 1    .  .  f  g  h      positions     0 1 2

Rows of one length need no mask. Models that cannot hide padding get only rows of one prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from steelyard.engine.adapter import Adapter
from steelyard.engine.model import Model

# Most tokens of one pass over prompts, padding included, and the shortest prompt of such a pass,
# relative to the longest: a token of padding costs as much as one of a prompt.
_PROMPT_TOKENS, _SHORTEST = 4096, 0.75


@dataclass(frozen=True)
class Prefix:
    """A prompt after its pass through the model.

    Attributes:
        prompt: its tokens, `[T]`.
        cache: the cache of its pass.
        row: its row there; its tokens are the last ones.
        logits: at the last position, `[V]`; in float32, or in float64 for a model of that dtype.
    """

    prompt: Tensor
    cache: DynamicCache
    row: int
    logits: Tensor

    def part(self, cached: Tensor) -> Tensor:
        """Part `[1, heads, T, width]` of the cache's keys or values `[N, heads, slots, width]`."""
        return cached[self.row : self.row + 1, :, cached.shape[-2] - len(self.prompt) :]


class DecodingBatch:
    """Sequences that each model call extends by one token.

    Args:
        model: the model.
        adapter: the adapter in use; None: the base model.

    Attributes:
        lengths: number of tokens of each row in the cache.
    """

    def __init__(self, model: Model, adapter: Adapter | None) -> None:
        self._model = model
        self._adapter = adapter
        self._cache: Any = DynamicCache(config=model.config)  # whose layers may be of any kind
        self.lengths: list[int] = []

    def prefill(self, prompts: Sequence[Tensor]) -> list[Prefix]:
        """Run prompts through the model, together where their lengths are similar."""
        by_index: dict[int, Prefix] = {}
        for indices in self._passes(prompts):
            together = [prompts[index] for index in indices]
            prefixes, _ = self._prefill(together, keep=1)
            by_index.update(zip(indices, prefixes, strict=True))
        return [by_index[index] for index in range(len(prompts))]

    def prefill_whole(self, prompt: Tensor) -> tuple[Prefix, Tensor]:
        """Run one prompt through the model; returns also the logits `[T, V]` at all positions."""
        (prefix,), logits = self._prefill([prompt], keep=0)
        return prefix, logits[0]

    def join(self, prefixes: Sequence[Prefix]) -> None:
        """Add a row for each prefix; one that is given again is another row of the same prompt."""
        lengths = [len(prefix.prompt) for prefix in prefixes]
        if not self.lengths:
            self._cache = copy.deepcopy(prefixes[0].cache)
        if self._model.supports_padding:
            slots = max([*lengths, *self.lengths])
            sources = [prefix.cache.layers for prefix in prefixes]
            for layer, *prefix_layers in zip(self._cache.layers, *sources, strict=True):
                pairs = list(zip(prefixes, prefix_layers, strict=True))
                keys = [prefix.part(source.keys) for prefix, source in pairs]
                values = [prefix.part(source.values) for prefix, source in pairs]
                if self.lengths:
                    keys, values = [layer.keys, *keys], [layer.values, *values]
                layer.keys, layer.values = _stack(keys, slots), _stack(values, slots)
        elif len(prefixes) > 1:
            self._cache.batch_repeat_interleave(len(prefixes))
        self.lengths += lengths

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all rows but these, and the padding that no row needs any more."""
        if len(rows) == len(self.lengths):
            return
        slots = max(self.lengths)
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            self._cache = DynamicCache(config=self._model.config)
            return
        self._cache.batch_select_indices(torch.tensor(rows, device=self._model.device))
        unused = slots - max(self.lengths)
        if unused:
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]

    def advance(self, tokens: Tensor) -> Tensor:
        """Append a token to each row; returns the logits `[N, V]` of the next ones."""
        self.lengths = [length + 1 for length in self.lengths]
        tokens = tokens[:, None]
        if min(self.lengths) == max(self.lengths):
            return self._logits(tokens, self._cache, keep=1)[:, -1]
        lengths = torch.tensor(self.lengths, device=self._model.device)[:, None]
        slots = torch.arange(max(self.lengths), device=self._model.device)
        mask = (slots >= len(slots) - lengths).long()
        inputs = {"attention_mask": mask, "position_ids": lengths - 1}
        return self._logits(tokens, self._cache, keep=1, **inputs)[:, -1]

    def _passes(self, prompts: Sequence[Tensor]) -> Iterator[list[int]]:
        """Indices of the prompts of each pass, the longest first."""
        together: list[int] = []
        for index in sorted(range(len(prompts)), key=lambda index: -len(prompts[index])):
            if together:
                longest = len(prompts[together[0]])
                if (
                    not self._model.supports_padding
                    or len(prompts[index]) < _SHORTEST * longest
                    or (len(together) + 1) * longest > _PROMPT_TOKENS
                ):
                    yield together
                    together = []
            together.append(index)
        if together:
            yield together

    def _prefill(self, prompts: Sequence[Tensor], *, keep: int) -> tuple[list[Prefix], Tensor]:
        slots = len(prompts[0])  # the longest
        padding = [slots - len(prompt) for prompt in prompts]
        tokens = torch.stack(
            [pad(prompt, (left, 0)) for prompt, left in zip(prompts, padding, strict=True)]
        )
        inputs = {}
        if any(padding):
            mask = torch.arange(slots) >= torch.tensor(padding)[:, None]
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            inputs = {
                "attention_mask": mask.long().to(self._model.device),
                "position_ids": positions.to(self._model.device),
            }
        cache = DynamicCache(config=self._model.config)
        logits = self._logits(tokens, cache, keep=keep, **inputs)
        prefixes = [
            Prefix(prompt, cache, row, logits[row, -1]) for row, prompt in enumerate(prompts)
        ]
        return prefixes, logits

    def _logits(
        self, tokens: Tensor, cache: DynamicCache, *, keep: int, **inputs: Tensor
    ) -> Tensor:
        output = self._model(
            self._adapter,
            input_ids=tokens.to(self._model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
            **inputs,
        )
        logits: Tensor = output.logits
        return logits if logits.dtype == torch.float64 else logits.float()


def _stack(parts: Sequence[Tensor], slots: int) -> Tensor:
    """Rows `[N, heads, slots, width]`, each padded with zeros on the left."""
    return torch.cat([pad(part, (0, 0, slots - part.shape[-2], 0)) for part in parts])
