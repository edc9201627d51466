"""Reference training: plain transformers, LoRA as two matrices, torch's autograd and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tinker import types
from torch import Tensor, nn

from steelyard.engine import tiny

ALPHA = 32
Loss = Callable[[Sequence[Tensor]], Tensor]


def datum(tokens: Sequence[int], targets: Any, **fields: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens)),
        loss_fn_inputs={"target_tokens": targets, **fields},
    )


class ByHand:
    """A LoRA of the tiny model: y = Wx + (alpha / rank) B A x, in every layer that has weights."""

    def __init__(self, weights: Mapping[str, Tensor], rank: int, dtype: torch.dtype) -> None:
        self.model = tiny.build(dtype).eval().requires_grad_(requires_grad=False)
        self.weights = {key: nn.Parameter(value.clone()) for key, value in weights.items()}
        for key in self.weights:
            if "lora_A" in key:
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                down, up = self.weights[key], self.weights[key.replace("lora_A", "lora_B")]
                layer = self.model.get_submodule(name)
                layer.register_forward_hook(_adding(down, up, ALPHA / rank))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        logits: Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return logits

    def logprobs(self, data: Sequence[types.Datum]) -> list[Tensor]:
        found = []
        for each in data:
            targets = each.loss_fn_inputs["target_tokens"].to_torch()
            rows = self.logits(each.model_input.to_ints()).log_softmax(-1)
            picked = rows.gather(-1, targets.reshape(len(targets), -1))
            found.append(picked.reshape(targets.shape))
        return found

    def gradients(self, data: Sequence[types.Datum], loss: Loss) -> dict[str, Tensor]:
        value = loss(self.logprobs(data))
        found = torch.autograd.grad(value, list(self.weights.values()))
        return dict(zip(self.weights, found, strict=True))


def _adding(down: Tensor, up: Tensor, scale: float) -> Callable[..., Tensor]:
    def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + (inputs[0] @ down.T @ up.T) * scale

    return hook
