"""Kernels of elementwise layers, on a GPU or through Triton's interpreter, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3TextConfig
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama

from steelyard.engine import tiny
from steelyard.engine._triton_layers import RmsNorm, Rotary, SwiGlu
from steelyard.engine.fused_layers import fuse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, weight.shape, weight, 1e-5)


def rotate(x: Tensor) -> Tensor:
    apply: Any = modeling_llama.apply_rotary_pos_emb  # it has no types
    rotated: Tensor = apply(x, x, COS, SIN)[0]
    return rotated


def kernel(function: Any) -> Callable[..., Tensor]:
    apply: Callable[..., Tensor] = function.apply
    return apply


COS, SIN = random(1, 5, 12), random(1, 5, 12, seed=1)
WEIGHT = random(33)
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]] = {
    "norm": (
        lambda x: kernel(RmsNorm)(x, WEIGHT, 1e-5),
        lambda x: norm(x, WEIGHT),
        [random(3, 4, 33)],
    ),
    "swiglu": (
        kernel(SwiGlu),
        lambda a, b: nn.functional.silu(a) * b,
        [random(3, 700), random(3, 700, seed=1)],
    ),
    "rotary": (lambda x: kernel(Rotary)(x, COS, SIN), rotate, [random(1, 3, 5, 12)]),
}


@pytest.mark.parametrize(("fused", "plain", "inputs"), CASES.values(), ids=CASES.keys())
def test_values_and_gradients_are_those_of_plain_operations(
    fused: Callable[..., Any], plain: Callable[..., Any], inputs: list[Tensor]
) -> None:
    leaves = [x.clone().requires_grad_() for x in inputs]
    found, expected = fused(*leaves), plain(*leaves)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    upstream = random(*found.shape, seed=2)
    wanted = torch.autograd.grad(expected, leaves, upstream)
    # Twice through one graph: a backward pass leaves the saved tensors as they are.
    for _ in range(2):
        gradients = torch.autograd.grad(found, leaves, upstream, retain_graph=True)
        for gradient, right in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)
    for leaf, x in zip(leaves, inputs, strict=True):
        assert torch.equal(leaf, x)


def outputs(base: Any) -> tuple[Tensor, Tensor]:
    """Logits of three tokens, and the gradient of their sum by the embeddings."""
    embeddings = random(1, 3, 64).requires_grad_()
    logits = base(inputs_embeds=embeddings, use_cache=False).logits
    (gradient,) = torch.autograd.grad(logits.square().sum(), embeddings)
    return logits.detach(), gradient


def frozen() -> Any:
    base = tiny.build(torch.float32).to(DEVICE).eval().requires_grad_(requires_grad=False)
    nn.init.normal_(base.model.norm.weight)
    return base


def test_a_model_computes_the_same_with_kernels() -> None:
    torch.manual_seed(0)
    base = frozen()
    expected = outputs(base)
    before = modeling_llama.apply_rotary_pos_emb
    kinds = ["LlamaMLP", "LlamaRMSNorm", "LlamaRotaryEmbedding"]
    assert fuse(base) == kinds
    for found, wanted in zip(outputs(base), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    # Another one does not wrap the function of the architecture again, and a plain one is as ever.
    rotation = modeling_llama.apply_rotary_pos_emb
    assert fuse(frozen()) == kinds
    assert modeling_llama.apply_rotary_pos_emb is rotation
    torch.manual_seed(0)
    for found, wanted in zip(outputs(frozen()), expected, strict=True):
        assert torch.equal(found, wanted)
    modeling_llama.apply_rotary_pos_emb = before


@pytest.mark.parametrize("largest", [0.0, 300.0])
def test_a_layer_that_computes_something_else_keeps_its_own_way(largest: float) -> None:
    class ShiftedRMSNorm(nn.Module):  # as Gemma's: its weight is added to 1
        def __init__(self) -> None:
            super().__init__()
            self.eps = 1e-6
            self.weight = nn.Parameter(random(16), requires_grad=False)
            self.weight[3] = largest

        def forward(self, x: Tensor) -> Tensor:
            return norm(x, 1 + self.weight)

    layer = nn.Sequential(ShiftedRMSNorm())
    assert fuse(layer) == []
    assert "forward" not in vars(layer[0])


def test_experts_whose_matrices_are_parameters_keep_their_own_way() -> None:
    experts = nn.Module()
    for part in ("gate_proj", "up_proj", "down_proj"):
        experts.register_parameter(part, nn.Parameter(random(2, 8, 8)))
    experts.act_fn = nn.SiLU()
    assert fuse(nn.Sequential(experts)) == []
    assert "forward" not in vars(experts)


def test_an_embedding_with_frequencies_for_each_kind_of_layer_keeps_its_own_way() -> None:
    config = Gemma3TextConfig(head_dim=8, hidden_size=8)
    embedding = modeling_gemma3.Gemma3RotaryEmbedding(config)
    own = modeling_gemma3.apply_rotary_pos_emb
    assert fuse(nn.Sequential(embedding)) == []
    assert modeling_gemma3.apply_rotary_pos_emb is own
    assert "forward" not in vars(embedding)


def test_a_layer_on_another_device_computes_without_the_kernel() -> None:
    """As a merged model does that is moved to a CPU."""
    base = frozen()
    fuse(base)
    moved = base.to("meta")
    assert moved(torch.zeros(1, 3, dtype=torch.int64, device="meta")).logits.shape == (1, 3, 512)
