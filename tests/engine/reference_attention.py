"""Attention over packed sequences by plain SDPA, one sequence at a time: a reference for CPUs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """`varlen_attn` of torch 2.13: `[tokens, heads, width]`, with lengths from cumulative ones."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert enable_gqa or query.shape[1] == key.shape[1]
    ends = cu_seq_q.tolist()
    lengths = [stop - start for start, stop in pairwise(ends)]
    assert max_q == max_k == max(lengths)
    assert sum(lengths) == len(query)
    left, right = window_size
    assert right == 0
    parts = []
    split: Any = torch.split  # it has no types
    for q, k, v in zip(*(split(x, lengths) for x in (query, key, value)), strict=True):
        position = torch.arange(len(q))
        distance = position[:, None] - position
        mask = (distance >= 0) & ((distance <= left) | (left < 0))
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask[None, None], scale=scale, enable_gqa=enable_gqa
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def equal_heads_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """`varlen_attn` of torch 2.11, which takes no shared heads."""
    sizes: Any = (cu_seq_q, cu_seq_k, max_q, max_k)
    return grouped_attention(query, key, value, *sizes, scale=scale, window_size=window_size)
