from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from steelyard.engine import tiny
from steelyard.engine.attention import attend
from steelyard.engine.model import Model
from steelyard.engine.model_sources import ModelSource


def tensors(heads: int, shared: int, queries: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.ones(3, 1, queries, 7, dtype=torch.bool)
    mask[0, ..., :4] = False
    return {
        "query": draw(3, heads, queries, 8),
        "key": draw(3, shared, 7, 8),
        "value": draw(3, shared, 7, 8),
        "attention_mask": mask,
    }


@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (6, 6), (9, 3), (4, 1)])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("options", [{}, {"scaling": 0.3}])
def test_it_is_the_attention_of_transformers(
    heads: int, shared: int, queries: int, options: dict[str, Any]
) -> None:
    module = nn.Module()
    module.num_key_value_groups = heads // shared  # type: ignore[assignment]  # as its layers have
    inputs = {**tensors(heads, shared, queries), **options}
    expected, _ = sdpa_attention_forward(module, **inputs)
    found, _ = attend(module, **inputs)
    assert found.shape == (3, queries, heads, 8)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_what_changes_the_formula_is_left_to_transformers() -> None:
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]  # as its layers have
    with pytest.raises(ValueError, match="softcap"):
        attend(module, **tensors(6, 2, 1), softcap=30.0)
    bias = torch.randn(1, 6, 1, 7, dtype=torch.float64)
    biased, _ = attend(module, **tensors(6, 2, 1), position_bias=bias)
    plain, _ = attend(module, **tensors(6, 2, 1))
    assert not torch.allclose(biased, plain)


def test_a_model_with_sdpa_uses_it_and_another_keeps_its_own() -> None:
    def attention(implementation: str) -> object:
        def build(dtype: torch.dtype, device: torch.device) -> Any:
            base = tiny.build(dtype)
            base.set_attn_implementation(implementation)
            base._supports_sdpa = implementation == "sdpa"
            return base

        source = ModelSource("m", build, tiny.tokenizer, None, tiny.config)
        return Model(source, torch.device("cpu"), torch.float32).config._attn_implementation

    assert attention("sdpa") == "steelyard_sdpa"
    assert attention("eager") == "eager"
