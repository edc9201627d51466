"""Data, clients and references that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard.engine import LocalSamplingClient, LocalServiceClient, LocalTrainingClient, tiny
from steelyard.errors import CheckpointError

SMALL = types.AdamParams(learning_rate=0.01)
LENGTHS = [9, 4, 14, 1, 7]
PROMPT = [10, 20, 30, 40]


def datum(tokens: Sequence[int], targets: Any = None, **fields: Any) -> types.Datum:
    """A datum whose targets are the next tokens; `fields` are tensors or lists."""
    tokens = list(tokens)
    asked = [*tokens[1:], 7] if targets is None else targets
    inputs = {name: _data(value) for name, value in {"target_tokens": asked, **fields}.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def ragged(seed: int, lengths: Sequence[int], width: int | None = None) -> list[types.Datum]:
    """Random tokens, targets and weights; targets `[T, width]` if there is a width."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for length in lengths:
        shape = (length,) if width is None else (length, width)
        tokens = torch.randint(tiny.VOCABULARY, (length,), generator=generator)
        targets = torch.randint(tiny.VOCABULARY, shape, generator=generator)
        weights = torch.randn(shape, generator=generator)
        data.append(datum(tokens.tolist(), targets, weights=weights))
    return data


def squares(data: Any, rows: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """A custom loss that is no sum over tokens."""
    flat = torch.cat([row.flatten() for row in rows])
    return flat.sum().square() / 1000 + flat.square().sum(), {"tokens": float(len(flat))}


def create(service: LocalServiceClient, base_model: str = "tiny-random", **settings: Any) -> Any:
    """A training client of rank 4 with seed 0, unless `settings` say otherwise."""
    return service.create_lora_training_client(base_model, **{"rank": 4, "seed": 0, **settings})


def train(client: LocalTrainingClient, steps: int = 1, seed: int = 9) -> None:
    """Make a few steps, so that the adapter is no longer the base model."""
    for step in range(steps):
        client.forward_backward(ragged(seed + step, [9, 4]), "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.05)).result()


def train_on(client: Any, steps: int = 2) -> dict[str, Tensor]:
    """Make a few small steps on `BATCH`, and return the weights."""
    for _ in range(steps):
        client.forward_backward(BATCH, "cross_entropy")
        client.optim_step(SMALL).result()
    weights: dict[str, Tensor] = client.weights()
    return weights


def saved(client: Any, name: str = "a", **options: Any) -> str:
    """Path of a new checkpoint with the optimizer."""
    path: str = client.save_state(name, **options).result().path
    return path


def folder_of(service: LocalServiceClient, path: str) -> Path:
    """Folder of a checkpoint."""
    found = service.checkpoints._find(path)
    assert found.is_dir()
    return found


def check_load_fails(client: Any, path: Any, message: str, *, optimizer: bool = False) -> None:
    """Check that loading raises, that the client has not changed, and that it still trains."""
    client.forward_backward(BATCH, "cross_entropy").result()
    weights, gradients = client.weights(), client.gradients()
    load = client.load_state_with_optimizer if optimizer else client.load_state
    with pytest.raises(CheckpointError, match=message):
        load(path).result()
    assert same(client.weights(), weights)
    assert same(client.gradients(), gradients)
    client.optim_step(SMALL).result()
    assert not same(client.weights(), weights)


def net(client: Any) -> Any:
    """The transformers or peft model of a client."""
    return client._worker.model._net


def adapters(client: Any) -> int:
    """Number of adapters with memory in one of the layers."""
    held = [
        name for name, _ in net(client).named_parameters() if "layers.0.self_attn.q_proj" in name
    ]
    return sum("lora_A" in name for name in held)


def prompt(tokens: list[int] | None = None) -> types.ModelInput:
    return types.ModelInput.from_ints(PROMPT if tokens is None else tokens)


def sample(
    sampling: LocalSamplingClient,
    tokens: list[int] | None = None,
    count: int = 1,
    options: dict[str, Any] | None = None,
    **params: Any,
) -> types.SampleResponse:
    """Samples of `PROMPT` or of `tokens`: six tokens with seed 0, unless `params` say otherwise."""
    chosen = types.SamplingParams(**{"max_tokens": 6, "seed": 0, **params})
    return sampling.sample(prompt(tokens), count, chosen, **(options or {})).result()


def distributions(training: LocalTrainingClient, tokens: list[int]) -> Tensor:
    """Log-probs `[T, V]` by plain transformers."""
    with torch.no_grad():
        found: Tensor = by_hand(training.weights(), tokens).logits[0].log_softmax(-1)
    return found


def logprobs(output: types.ForwardBackwardOutput) -> list[Tensor]:
    return [found["logprobs"].to_torch() for found in output.loss_fn_outputs]


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """True if two sets of weights are equal, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def close(a: Mapping[str, Tensor], b: Mapping[str, Tensor], tolerance: float) -> None:
    """Check that two sets of gradients agree, relative to the largest entry of all."""
    assert a.keys() == b.keys()
    scale = max(float(tensor.abs().max()) for tensor in b.values())
    assert scale > 0
    for key, tensor in a.items():
        assert float((tensor - b[key]).abs().max()) <= tolerance * scale, key


@cache
def base(dtype: torch.dtype) -> Any:
    # A test of decoding may be the first to ask for it, in inference mode.
    with torch.inference_mode(mode=False):
        return tiny.build(dtype).eval()


def by_hand(weights: Mapping[str, Tensor], tokens: Sequence[int], **options: Any) -> Any:
    """Output of plain transformers for tiny-random with W + 32/r BA in place of each W."""
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


BATCH = ragged(2, [8, 5])
