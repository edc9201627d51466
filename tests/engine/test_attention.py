"""Attention over packed sequences: its arguments, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from steelyard.engine import attention, tiny
from steelyard.engine.fast_paths import FastPaths
from steelyard.engine.model import Model
from steelyard.engine.model_sources import ModelSource

from .reference_attention import equal_heads_attention, grouped_attention

attend: Any = attention.attend
LENGTHS = [3, 1, 4]
REFERENCES = [equal_heads_attention, grouped_attention]


def tensors(heads: int, shared: int, width: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, count, sum(LENGTHS), width) for count in (heads, shared, shared)]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (6, 6)])
@pytest.mark.parametrize("window", [None, 2])
def test_each_sequence_attends_to_itself_alone(
    monkeypatch: pytest.MonkeyPatch, reference: Any, heads: int, shared: int, window: int | None
) -> None:
    monkeypatch.setattr(attention, "varlen_attn", reference)
    assert attention.takes_grouped_heads(reference) == (reference is grouped_attention)
    query, key, value = tensors(heads, shared)
    given: dict[str, Any] = attention.packed_arguments(LENGTHS, torch.device("cpu"))
    mask = given.pop("attention_mask")
    found, _ = attend(
        nn.Module(), query, key, value, mask, scaling=0.3, sliding_window=window, **given
    )
    assert found.shape == (1, 8, heads, 8)
    start = 0
    for length in LENGTHS:
        at = slice(start, start + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (window or length))  # the token itself counts
        expected = nn.functional.scaled_dot_product_attention(
            query[:, :, at], key[:, :, at], value[:, :, at], seen, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(found[:, at], expected.transpose(1, 2), rtol=0, atol=1e-12)
        start += length


@pytest.mark.parametrize(
    "options",
    [{"softcap": 30.0}, {"s_aux": torch.zeros(6)}, {"is_causal": False}, {"cache": object()}],
)
def test_other_formulas_are_refused(options: dict[str, Any]) -> None:
    given = attention.packed_arguments(LENGTHS, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="must be causal, with one row"):
        attend(nn.Module(), *tensors(6, 2), **given, **options)


def test_unequal_widths_are_refused() -> None:
    query, key, value = tensors(6, 2)
    given = attention.packed_arguments(LENGTHS, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="one width"):
        attend(nn.Module(), query, key, value[..., :4], **given)


def model_of(
    build: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float64
) -> Model:
    monkeypatch.setattr(attention, "varlen_attn", grouped_attention)
    monkeypatch.setattr(FastPaths, "of", lambda *_: FastPaths(packed_attention=True))
    source = ModelSource("m", lambda dtype, _: build().to(dtype), tiny.tokenizer, None, tiny.config)
    return Model(source, torch.device("cpu"), dtype)


def build(kind: str, **settings: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **settings})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("Llama", {}), ("Qwen3", {}), ("Mistral", {"sliding_window": 2})],
)
def test_an_architecture_packs_in_one_row_if_its_sequences_do_not_see_each_other(
    monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    assert model_of(lambda: build(kind, **settings), monkeypatch).packs_in_one_row


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen2Moe", {"use_sliding_window": True, "max_window_layers": 2}),
        ("Llama4Text", {"attention_chunk_size": 8, "intermediate_size_mlp": 24}),
    ],
)
def test_an_architecture_whose_window_is_in_the_mask_alone_keeps_rows(
    monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    """The window is wider than the sequences of the test on the model."""
    sizes = {"sliding_window": 8, "num_experts": 2, "num_experts_per_tok": 1}
    model = model_of(lambda: build(kind, **sizes, **settings), monkeypatch, torch.float32)
    assert not model.packs_in_one_row


def test_an_architecture_with_attention_of_its_own_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eager() -> Any:
        base = build("Llama")
        base.set_attn_implementation("eager")
        base._supports_sdpa = False
        return base

    assert not model_of(eager, monkeypatch).packs_in_one_row


def test_on_a_cpu_sequences_are_not_packed_in_one_row() -> None:
    source = ModelSource(
        "m", lambda dtype, _: build("Llama").to(dtype), tiny.tokenizer, None, tiny.config
    )
    model = Model(source, torch.device("cpu"), torch.float32)
    assert model.paths == FastPaths()
    assert not model.packs_in_one_row
    assert not model.computes_without_logits
    assert not model.recomputes
