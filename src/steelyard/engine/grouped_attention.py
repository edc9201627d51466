"""Attention of one new token a row under a mask, without copies of shared keys and values.

In grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) several query heads share a head
of keys and values. Under a mask, transformers repeats these for every query head: at each token it
copies the whole cache as many times as a group has heads. With a single query for each head, the
heads of a group can stand in the dimension of the queries instead, and nothing is copied:

    queries  [N, heads, 1, width]  ->  [N, heads / group, group, width]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_NAME = "steelyard_grouped"
# Arguments that change the formula: left to transformers.
_SPECIAL = ("position_bias", "softcap", "cache")


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """Let the model of this config attend without copies, if it attends by torch's SDPA."""
    # The attribute that transformers reads at each call; its public setter checks the whole model.
    before = config._attn_implementation  # noqa: SLF001
    if before == "sdpa":
        config._attn_implementation = _NAME  # noqa: SLF001
    try:
        yield
    finally:
        config._attn_implementation = before  # noqa: SLF001


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as that of `sdpa` in transformers, with the same arguments."""
    rows, heads, queries, width = query.shape
    if (
        attention_mask is None
        or attention_mask.shape[1] != 1
        or queries != 1
        or heads == key.shape[1]
        or any(options.get(name) is not None for name in _SPECIAL)
    ):
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return found
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)
