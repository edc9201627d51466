"""Data, weights and references that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from tinker import types
from torch import Tensor

from steelyard.engine import LocalTrainingClient, tiny

SMALL = types.AdamParams(learning_rate=0.01)


def datum(tokens: Sequence[int], targets: Any = None, **fields: Any) -> types.Datum:
    """A datum that asks for the next token; `fields` are tensors or lists."""
    tokens = list(tokens)
    asked = [*tokens[1:], 7] if targets is None else targets
    inputs = {name: _data(value) for name, value in {"target_tokens": asked, **fields}.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def ragged(seed: int, lengths: Sequence[int], width: int | None = None) -> list[types.Datum]:
    """Random tokens, targets and weights; targets `[T, width]` if there is a width."""
    dice = torch.Generator().manual_seed(seed)
    data = []
    for length in lengths:
        shape = (length,) if width is None else (length, width)
        tokens = torch.randint(tiny.VOCABULARY, (length,), generator=dice)
        targets = torch.randint(tiny.VOCABULARY, shape, generator=dice)
        data.append(datum(tokens.tolist(), targets, weights=torch.randn(shape, generator=dice)))
    return data


def train(client: LocalTrainingClient, steps: int = 1, seed: int = 9) -> None:
    """A few steps, so that the adapter is no longer the base model."""
    for step in range(steps):
        client.forward_backward(ragged(seed + step, [9, 4]), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.05)).result()


def logprobs(output: types.ForwardBackwardOutput) -> list[Tensor]:
    return [found["logprobs"].to_torch() for found in output.loss_fn_outputs]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of weights are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float) -> None:
    """Fail unless two sets of gradients agree, relative to the largest entry of all."""
    assert a.keys() == b.keys()
    scale = max(float(tensor.abs().max()) for tensor in b.values())
    assert scale > 0
    for key, tensor in a.items():
        assert float((tensor - b[key]).abs().max()) <= tolerance * scale, key


@cache
def base(dtype: torch.dtype) -> Any:
    return tiny.build(dtype).eval()


def by_hand(weights: Mapping[str, Tensor], tokens: Sequence[int], **options: Any) -> Any:
    """What plain transformers gives for tiny-random with W + 32/r BA in place of each W."""
    stems = {key.rsplit(".lora_", 1)[0] for key in weights}
    bare = base(next(iter(weights.values())).dtype)
    originals = dict(bare.named_parameters())
    merged = {}
    for stem in stems:
        a, b = weights[f"{stem}.lora_A.weight"], weights[f"{stem}.lora_B.weight"]
        name = stem.removeprefix("base_model.model.") + ".weight"
        merged[name] = originals[name].detach() + 32 / len(a) * b @ a
    inputs = {"input_ids": torch.tensor([list(tokens)]), "use_cache": False, **options}
    return torch.func.functional_call(bare, merged, (), inputs)


def _data(value: Any) -> types.TensorData:
    if isinstance(value, types.TensorData):
        return value
    return types.TensorData.from_torch(torch.as_tensor(value))
