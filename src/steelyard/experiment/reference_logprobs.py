"""The base model's own log-probs, for terms that hold a model near where it began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import safetensors
import safetensors.torch
import torch
from tinker import types

from steelyard.experiment.backend import Backend
from steelyard.experiment.data_files import Group
from steelyard.experiment.run_dir import RunFolder, write_whole

FIELD = "reference_logprobs"


def with_reference(groups: Sequence[Group], backend: Backend, run: RunFolder) -> list[Group]:
    """The data with the field `reference_logprobs`, for those that do not bring it.

    A fresh adapter changes nothing, so a client that has not been trained is the base model.
    What it gave is kept in the run folder.
    """
    data = [datum for group in groups for datum in group if FIELD not in datum.loss_fn_inputs]
    if not data:
        return list(groups)
    known = iter(_kept(run, data) or _computed(run, backend, data))

    def complete(datum: types.Datum) -> types.Datum:
        if FIELD in datum.loss_fn_inputs:
            return datum
        fields = {**datum.loss_fn_inputs, FIELD: types.TensorData.from_torch(next(known))}
        fresh = replace(datum, loss_fn_inputs=fields)
        object.__setattr__(fresh, "record", getattr(datum, "record", {}))
        return fresh

    return [[complete(datum) for datum in group] for group in groups]


def _computed(
    run: RunFolder, backend: Backend, data: Sequence[types.Datum]
) -> tuple[torch.Tensor, ...]:
    found = backend.logprobs(data)
    lengths = torch.tensor([len(row) for row in found])
    packed = safetensors.torch.save({"logprobs": torch.cat(found), "lengths": lengths})
    write_whole(run.path / "reference.safetensors", packed)
    return tuple(found)


def _kept(run: RunFolder, data: Sequence[types.Datum]) -> tuple[torch.Tensor, ...] | None:
    file = run.path / "reference.safetensors"
    if not file.is_file():
        return None
    try:
        held = safetensors.torch.load(file.read_bytes())
    except safetensors.SafetensorError:
        return None
    lengths = held["lengths"].tolist()
    if lengths != [datum.model_input.length for datum in data]:
        return None
    return torch.split(held["logprobs"], lengths)
