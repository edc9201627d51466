"""Attention of base models, registered with transformers under a name of its own.

`attend` computes what `sdpa` of transformers does, with two shortcuts: grouped heads of a single
query, and packed sequences, whose cumulative lengths come as the arguments of the model that
transformers passes on to attention functions (`cu_seq_lens_q`, `max_length_q`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# With "sdpa" in the name, transformers checks that the architecture supports it.
NAME = "steelyard_sdpa"
# Arguments that change the formula of attention: left to transformers.
_SPECIAL = ("position_bias", "softcap", "cache")
# Settings of a model by which its tokens see a part of the sequence alone. One that is not passed
# on to attention is in the mask.
_WINDOWS = ("sliding_window", "attention_chunk_size")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as `sdpa` of transformers does, without copies of shared keys and values.

    In grouped-query attention (Ainslie et al., 2023, arXiv:2305.13245) several query heads share a
    head of keys and values. Under a mask, transformers repeats these for every query head: for each
    token of a sample it copies the whole cache as many times as a group has heads. With a single
    query for each head, the heads of a group can stand in the dimension of the queries instead:

        queries  [N, heads, 1, width]  ->  [N, heads / group, group, width]
    """
    if options.get("cu_seq_lens_q") is not None:
        return _attend_packed(module, query, key, value, scaling, options), None
    rows, heads, queries, width = query.shape
    if (
        attention_mask is None
        or attention_mask.shape[1] != 1
        or queries != 1
        or heads == key.shape[1]
        or any(options.get(name) is not None for name in _SPECIAL)
    ):
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return attended
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_arguments(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Arguments of a model for sequences that lie one after another in one row.

    The lengths are arguments, and no state, so that a layer that is computed again in the backward
    pass finds those of its own packing.
    """
    cumulative = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    return {
        "cu_seq_lens_q": cumulative,
        "cu_seq_lens_k": cumulative,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        # A mask of four dimensions is not replaced: transformers makes none of its own, which
        # would have [tokens, tokens] entries. `attend` does not read it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
    }


def _attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    options: Mapping[str, Any],
) -> Tensor:
    """Causal attention within each sequence of one row, `[1, tokens, heads, width]`.

    Raises:
        NotImplementedError: the architecture attends by a formula that the kernel does not have.
    """
    special = [name for name in (*_SPECIAL, "s_aux") if options.get(name) is not None]
    config = getattr(module, "config", None)
    special += [name for name in _WINDOWS if name not in options and getattr(config, name, None)]
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if special or not causal or query.shape[-1] != value.shape[-1] or query.shape[0] != 1:
        raise NotImplementedError(
            f"attention over packed sequences must be causal, with one row and one width of "
            f"queries and values, got {special or 'another kind'}."
        )
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    groups = queries.shape[1] // keys.shape[1]
    shared: dict[str, Any] = {}
    if groups > 1 and takes_grouped_heads(varlen_attn):
        shared = {"enable_gqa": True}
    elif groups > 1:
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    lengths, longest = options["cu_seq_lens_q"], options["max_length_q"]
    window = options.get("sliding_window")
    attended: Any = varlen_attn(
        queries,
        keys,
        values,
        lengths,
        lengths,
        longest,
        longest,
        scale=scaling,
        # Keys on the left and on the right of a query; -1: all. A window counts the query itself.
        window_size=(-1 if window is None else window - 1, 0),
        **shared,
    )
    output: Tensor = attended
    return output[None]


@cache
def takes_grouped_heads(function: Any) -> bool:
    """Return whether an attention function takes shared heads, as torch's does from 2.13 on."""
    return "enable_gqa" in inspect.signature(function).parameters
