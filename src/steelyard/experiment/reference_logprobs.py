"""Log-probs of the base model, for terms that keep the model close to it, such as a KL term."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import safetensors
import safetensors.torch
import torch
from tinker import types

from steelyard.experiment.backend import Backend
from steelyard.experiment.data_files import Group
from steelyard.experiment.run_dir import RunFolder, write_atomic

FIELD = "reference_logprobs"


def add_reference_logprobs(
    groups: Sequence[Group], backend: Backend, run: RunFolder
) -> list[Group]:
    """Add the field `reference_logprobs`, `[T]`, to each datum that does not have it.

    The client must be untrained: an untrained LoRA adapter (B = 0) leaves the model unchanged, so
    its log-probs are those of the base model. They are cached in the run folder, for a resumed run,
    with a digest of the model's name and of all tokens.
    """
    data = [datum for group in groups for datum in group if FIELD not in datum.loss_fn_inputs]
    if not data:
        return list(groups)
    logprobs = iter(_cached(run, data) or _compute(run, backend, data))

    def complete(datum: types.Datum) -> types.Datum:
        if FIELD in datum.loss_fn_inputs:
            return datum
        fields = {**datum.loss_fn_inputs, FIELD: types.TensorData.from_torch(next(logprobs))}
        completed = replace(datum, loss_fn_inputs=fields)
        object.__setattr__(completed, "record", getattr(datum, "record", {}))
        return completed

    return [[complete(datum) for datum in group] for group in groups]


def _compute(
    run: RunFolder, backend: Backend, data: Sequence[types.Datum]
) -> tuple[torch.Tensor, ...]:
    logprobs = backend.logprobs(data)
    lengths = torch.tensor([len(row) for row in logprobs])
    tensors = {"logprobs": torch.cat(logprobs), "lengths": lengths}
    packed = safetensors.torch.save(tensors, metadata={"digest": _digest(run, data)})
    write_atomic(run.path / "reference.safetensors", packed)
    return tuple(logprobs)


def _cached(run: RunFolder, data: Sequence[types.Datum]) -> tuple[torch.Tensor, ...] | None:
    file = run.path / "reference.safetensors"
    if not file.is_file():
        return None
    try:
        with safetensors.safe_open(file, framework="pt") as cache:
            # Lengths alone would not tell other data, or another model, from these.
            if (cache.metadata() or {}).get("digest") != _digest(run, data):
                return None
            return torch.split(cache.get_tensor("logprobs"), cache.get_tensor("lengths").tolist())
    except safetensors.SafetensorError:
        return None


def _digest(run: RunFolder, data: Sequence[types.Datum]) -> str:
    """SHA-256 of what the log-probs depend on: the model, and the tokens of each datum."""
    settings = run.config().model
    model = [settings.backend, settings.base_url, settings.base_model, settings.dtype]
    digest = hashlib.sha256(json.dumps(model).encode())
    for datum in data:
        targets = datum.loss_fn_inputs["target_tokens"].to_torch().tolist()
        digest.update(json.dumps([datum.model_input.to_ints(), targets]).encode())
    return digest.hexdigest()
