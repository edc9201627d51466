"""Export of a checkpoint: a folder that transformers, peft, vLLM and llama.cpp's converters load.

An adapter's folder has its weights, its settings with the Hub id of the base model, or its path if
that is not known, and the tokenizer with its chat template; if the base model has no folder of its
own, it is written to `base/` in there. A merged folder has a whole model, with the adapter added to
the weights.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from steelyard.engine.adapter import LoraSettings
from steelyard.engine.checkpoint_contents import CONFIG, WEIGHTS, CheckpointContents
from steelyard.engine.checkpoints import Checkpoints
from steelyard.engine.model import Model
from steelyard.engine.model_sources import ModelSource, find_model, without_progress_bars
from steelyard.engine.service_client import choose_device, choose_dtype
from steelyard.errors import CheckpointError, InputError, StateError

_BASE = "base"
_CARD = "README.md"
_ORIGIN = "steelyard.json"


def export_checkpoint(
    checkpoint_dir: str | Path,
    path: str,
    folder: str | Path,
    *,
    merge: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    card: str | None = None,
) -> Path:
    """Write a checkpoint into a new folder, which appears whole or not at all.

    Args:
        checkpoint_dir: folder of the checkpoints, as of `LocalServiceClient`.
        path: of the checkpoint, as `save_state` returned it.
        folder: new, or empty.
        merge: write a whole model instead of an adapter.
        device: that the model was trained on, as in `LocalServiceClient`; decides the dtype alone.
        dtype: of the model's weights, as in `LocalServiceClient`. Merging itself is in float32.
        card: text of its `README.md`; None: it has none.

    Returns:
        The folder's absolute path.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ModelError: its base model cannot be loaded.
        InputError: the folder is not empty or cannot be written, or the dtype is unknown.
    """
    target = Path(folder).expanduser().absolute()
    saved_dtype = choose_dtype(dtype, choose_device(device))
    _check_free(target)
    contents = Checkpoints(Path(checkpoint_dir)).read(path)
    source = find_model(contents.info["base_model"])
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        scratch.mkdir(parents=True)
        if card is not None:
            (scratch / _CARD).write_text(card, encoding="utf-8")
        if merge:
            model = _merged(contents, source, path, saved_dtype)
            with without_progress_bars():
                model.save_pretrained(scratch)
        else:
            _write_adapter(contents, source, scratch, target, saved_dtype)
        source.tokenizer().save_pretrained(scratch)
        _apply_umask(scratch)
        scratch.rename(target)  # also in the place of an empty folder
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        raise _not_writable(target, error) from error
    finally:  # also after Ctrl-C
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _check_free(target: Path) -> None:
    try:
        if target.is_symlink() or not target.is_dir():
            is_free = not os.path.lexists(target)
        else:
            is_free = not any(target.iterdir())
    except OSError as error:
        raise _not_writable(target, error) from error
    if not is_free:
        raise InputError(
            f"the folder to export to must be new or empty, and {target} is not: choose another."
        )


def _not_writable(target: Path, error: Exception) -> InputError:
    return InputError(
        f"the folder to export to must be one that can be written, and writing {target} failed: "
        f"{error}."
    )


def _apply_umask(folder: Path) -> None:
    """Let the modes of all files follow the umask: safetensors writes files for the owner alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(stat.S_IMODE(mode))


def _merged(
    contents: CheckpointContents, source: ModelSource, path: str, dtype: torch.dtype
) -> Any:
    # In 16 bits the sum of weight and adapter would be rounded twice.
    exact = torch.promote_types(dtype, torch.float32)
    model = Model(source, torch.device("cpu"), exact)
    adapter = model.add_adapter(LoraSettings(**contents.info["lora"]))
    try:
        adapter.load(contents.weights, None)
    except StateError as error:
        raise CheckpointError(f"the checkpoint {path!r} does not fit: {error}") from error
    return model.merge(adapter).to(dtype)


def _write_adapter(
    contents: CheckpointContents,
    source: ModelSource,
    folder: Path,
    target: Path,
    dtype: torch.dtype,
) -> None:
    if source.location is None:
        model = source.model(dtype)
        with without_progress_bars():
            model.save_pretrained(folder / _BASE)
        source.tokenizer().save_pretrained(folder / _BASE)
        base = str(target / _BASE)
    else:
        base = source.hub_id or source.location()
        if base != source.location():
            # A path of this machine would be of no use elsewhere, and here it spares a download.
            origin = {"base_model": source.name, "base_model_path": source.location()}
            (folder / _ORIGIN).write_text(json.dumps(origin, indent=2), encoding="utf-8")
    config = {**contents.config, "base_model_name_or_path": base}
    save_file(dict(contents.weights), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
