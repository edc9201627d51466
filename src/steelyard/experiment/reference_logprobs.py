"""Log-probs of the base model, for terms that keep the model close to it, such as a KL term.

They are cached in `reference.safetensors`, by a digest of the model and of the tokens of a datum:
in the run folder, for a resumed run, or for the runs of an ablation or a search, which have the
same model and data, in the folder of all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import filelock
import safetensors
import safetensors.torch
from tinker import types
from torch import Tensor

from steelyard.experiment.backend import Backend
from steelyard.experiment.config import ModelConfig
from steelyard.experiment.data_files import Group
from steelyard.experiment.run_dir import RunFolder, write_atomic

FIELD = "reference_logprobs"
REFERENCE_FILE = "reference.safetensors"
_LEVELS = 2  # a shared cache is in the parent of a run folder, or in the parent of that


def add_reference_logprobs(
    groups: Sequence[Group],
    backend: Backend,
    run: RunFolder,
    say: Callable[[str], None] = lambda _: None,
) -> list[Group]:
    """Add the field `reference_logprobs`, `[T]`, to each datum that does not have it.

    The client must be untrained: an untrained LoRA adapter (B = 0) leaves the model unchanged, so
    its log-probs are those of the base model. Only data that are not in the cache are computed.
    """
    data = [datum for group in groups for datum in group if FIELD not in datum.loss_fn_inputs]
    if not data:
        return list(groups)
    model = run.config().model
    digests = [_digest(model, datum) for datum in data]
    file = _cache_file(run.path)
    # Runs that start at the same time wait for the first one instead of computing the same. The
    # folder of a run is locked by it already.
    is_shared = file.parent != run.path
    lock = filelock.FileLock(file.with_name(f".{file.name}.lock")) if is_shared else nullcontext()
    with lock:
        cached = _look_up(dict(zip(digests, data, strict=True)), backend, file, say)
    logprobs = (cached[digest] for digest in digests)

    def complete(datum: types.Datum) -> types.Datum:
        known = FIELD in datum.loss_fn_inputs
        return datum if known else with_reference(datum, next(logprobs))

    return [[complete(datum) for datum in group] for group in groups]


def with_reference(datum: types.Datum, logprobs: Tensor) -> types.Datum:
    """Copy of a datum with the field `reference_logprobs`."""
    fields = {**datum.loss_fn_inputs, FIELD: types.TensorData.from_torch(logprobs)}
    completed = replace(datum, loss_fn_inputs=fields)
    object.__setattr__(completed, "record", getattr(datum, "record", {}))
    return completed


def share_reference_logprobs(folder: Path) -> None:
    """Let the runs in this folder share one cache, which begins empty."""
    if not (folder / REFERENCE_FILE).exists():
        write_atomic(folder / REFERENCE_FILE, safetensors.torch.save({}))


def merge_reference_logprobs(folder: Path, content: bytes) -> None:
    """Add the log-probs of another machine's cache to the one that runs in this folder share."""
    file = folder / REFERENCE_FILE
    with filelock.FileLock(file.with_name(f".{file.name}.lock")):
        known, computed = _read(file), safetensors.torch.load(content)
        if not computed.keys() <= known.keys():
            write_atomic(file, safetensors.torch.save(known | computed))


def _look_up(
    data: Mapping[str, types.Datum], backend: Backend, file: Path, say: Callable[[str], None]
) -> dict[str, Tensor]:
    """Log-probs of these data, by digest: from the cache, or computed and added to it."""
    known = _read(file)
    missing = {digest: datum for digest, datum in data.items() if digest not in known}
    if missing:
        say("computing the base model's log-probs")
        report = _report_tenths(len(missing), say)
        computed = backend.logprobs(list(missing.values()), report)
        known |= zip(missing, computed, strict=True)
        write_atomic(file, safetensors.torch.save(known))
    return known


def _report_tenths(count: int, say: Callable[[str], None]) -> Callable[[int], None]:
    """Function of the number of data that are done, which says each tenth of `count` but the last.

    Example:
        >>> report = _report_tenths(40, print)
        >>> for done in (16, 17, 32, 40):
        ...     report(done)
        base model's log-probs: 16 of 40 examples
        base model's log-probs: 32 of 40 examples
    """
    said = 0

    def report(done: int) -> None:
        nonlocal said
        tenths = 10 * done // count
        if said < tenths and done < count:
            said = tenths
            say(f"base model's log-probs: {done} of {count} examples")

    return report


def _cache_file(run: Path) -> Path:
    """Cache of a run: one that its parent folders share, or else its own."""
    shared = (folder / REFERENCE_FILE for folder in list(run.absolute().parents)[:_LEVELS])
    return next((file for file in shared if file.is_file()), run / REFERENCE_FILE)


def _read(file: Path) -> dict[str, Tensor]:
    """Content of a cache; empty if there is none, or if it is damaged."""
    try:
        return safetensors.torch.load(file.read_bytes())
    except (FileNotFoundError, safetensors.SafetensorError):
        return {}


def _digest(model: ModelConfig, datum: types.Datum) -> str:
    """SHA-256 of what the log-probs depend on: the model, and the tokens."""
    targets = datum.loss_fn_inputs["target_tokens"].to_torch().tolist()
    settings = [model.backend, model.base_url, model.base_model, model.dtype]
    content = json.dumps([settings, datum.model_input.to_ints(), targets])
    return hashlib.sha256(content.encode()).hexdigest()
