"""Files of one checkpoint, with a SHA-256 sum of each.

checkpoint.json             the training run, its settings and its companions; the sums of all files
adapter_model.safetensors   the LoRA weights
adapter_config.json         the adapter's settings, as peft writes them
optimizer.safetensors       AdamW's state; a checkpoint for sampling has none

A file cannot hold the sum of its own bytes. The sum of `checkpoint.json` is that of its values
without that sum, in one fixed spelling. Format 1, which version 0.1.0 wrote, has no sums; for it
the types of the values and the finiteness of the tensors are checked alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from steelyard.engine.adapter import LoraSettings
from steelyard.engine.checkpoint_contents import CheckpointContents
from steelyard.errors import CheckpointError
from steelyard.spec import is_finite

FORMAT = 2
DESCRIPTION = "checkpoint.json"
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
_SUMS = "sha256"

Sums = Mapping[str, str]


def encode(name: str, contents: CheckpointContents) -> dict[str, bytes]:
    """Contents of each file of the checkpoint `name`.

    Raises:
        CheckpointError: `contents.info` or `contents.config` are no JSON, or a weight is NaN or
            infinite, so that the checkpoint could not be loaded.
    """
    tensors = {**contents.weights, **(contents.optimizer_state or {})}
    if (broken := _not_finite(tensors)) is not None:
        raise CheckpointError(
            f"the weights of the checkpoint {name!r} must be finite, and {broken} holds NaN or "
            f"infinity: go back to the checkpoint before, with a lower learning rate or "
            f"grad_clip_norm."
        )
    try:
        files = {CONFIG: _json(contents.config)}
        # As it will be read back, so that its sum is the same: without tuples and numeric keys.
        info = json.loads(json.dumps({**contents.info, "format": FORMAT}))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"what is saved with the checkpoint {name!r} must be ready for JSON, and it is not: "
            f"{error}"
        ) from error
    files[WEIGHTS] = safetensors.torch.save(dict(contents.weights))
    if contents.optimizer_state is not None:
        files[OPTIMIZER] = safetensors.torch.save(dict(contents.optimizer_state))
    sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
    return {**files, DESCRIPTION: _describe(info, sums)}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, and flush them and their names to the disk."""
    for name, content in files.items():
        with (folder / name).open("wb") as file:
            file.write(content)
            # The data must be on the disk before the link is, or a power cut could leave a link to
            # empty files.
            file.flush()
            os.fsync(file.fileno())
    flush_names(folder)


def flush_names(folder: Path) -> None:
    """Flush the names in a folder to the disk, on systems that can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Path, path: str) -> CheckpointContents:
    """Read the checkpoint in a folder, and check it.

    Args:
        folder: of its files.
        path: of the checkpoint as the caller gave it, for error messages.

    Raises:
        CheckpointError: there is none, or a file of it is damaged or cannot be read.
    """
    info, sums = _read_description(folder, path)
    # Without sums, a checkpoint for sampling is known by the file that is not there.
    has_optimizer = OPTIMIZER in sums if sums else os.path.lexists(folder / OPTIMIZER)
    with _damage_of(CONFIG, path):
        config = _parse(_read_bytes(folder, CONFIG, sums))
    return CheckpointContents(
        info=info,
        weights=_read_tensors(folder, WEIGHTS, sums, path),
        optimizer_state=_read_tensors(folder, OPTIMIZER, sums, path) if has_optimizer else None,
        config=config,
    )


def read_info(folder: Path, path: str) -> dict[str, Any]:
    """Read the `info` of a checkpoint alone, without its tensors.

    Raises:
        CheckpointError: there is no checkpoint, or its description is damaged or cannot be read.
    """
    return _read_description(folder, path)[0]


def change_info(folder: Path, path: str, changes: Mapping[str, Any]) -> None:
    """Replace values of a checkpoint's `info`, atomically and without reading its tensors.

    Raises:
        CheckpointError: there is no checkpoint, or its description is damaged or cannot be read.
        OSError: the file cannot be written.
    """
    info, sums = _read_description(folder, path)
    fresh = folder / f".checkpoint.{uuid.uuid4().hex}"
    try:
        write(folder, {fresh.name: _describe({**info, **changes}, sums)})
        fresh.replace(folder / DESCRIPTION)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def not_found(path: object, reason: object = None) -> CheckpointError:
    """Error for a path at which there is no checkpoint."""
    why = "" if reason is None else f": {reason}"
    return CheckpointError(f"path must be that of a checkpoint, and {path!r} is none{why}.")


def _describe(info: Mapping[str, Any], sums: Sums) -> bytes:
    """Content of `checkpoint.json`; `sums` are those of the other files, empty in format 1."""
    if not sums:
        return _json(info)
    return _json({**info, _SUMS: {**sums, DESCRIPTION: _own_sum(info, sums)}})


def _own_sum(info: Mapping[str, Any], sums: Sums) -> str:
    return hashlib.sha256(_json({**info, _SUMS: sums})).hexdigest()


def _read_description(folder: Path, path: str) -> tuple[dict[str, Any], Sums]:
    """Values of `checkpoint.json`, and the sums of the other files; none in format 1."""
    with _damage_of(DESCRIPTION, path):
        try:
            content = _read_bytes(folder, DESCRIPTION, {})
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(path) from None
        info = _parse(content)
        _check_info(info)
        sums = info.pop(_SUMS, {})
        if not sums and info.get("format") == FORMAT:
            raise ValueError("it has no sums")
        if sums:
            own = sums.pop(DESCRIPTION, None)
            if own != _own_sum(info, sums) or not {WEIGHTS, CONFIG} <= sums.keys():
                raise ValueError("its values do not have the SHA-256 sum that it states")
    return info, sums


def _check_info(info: dict[str, Any]) -> None:
    if not {"base_model", "lora"} <= info.keys():
        raise ValueError("it does not say what was trained")
    rules = {
        "format": ("1 or 2; a newer version of steelyard may have written it", _is_known_format),
        "base_model": ("a string", lambda value: isinstance(value, str)),
        "model_id": ("a string", lambda value: isinstance(value, str)),
        "created_at": ("a finite number", is_finite),
        "expires_at": ("a finite number or null", lambda value: value is None or is_finite(value)),
        "user_metadata": ("an object", lambda value: isinstance(value, dict)),
        "companions": ("an object", lambda value: isinstance(value, dict)),
        "lora": ("an object", lambda value: isinstance(value, dict)),
        _SUMS: ("an object", lambda value: isinstance(value, dict)),
    }
    for key, (rule, is_valid) in rules.items():
        if key in info and not is_valid(info[key]):
            raise ValueError(f"{key} must be {rule}, got {info[key]!r:.80}")
    LoraSettings(**info["lora"])


def _is_known_format(value: object) -> bool:
    return type(value) is int and 1 <= value <= FORMAT


def _read_tensors(folder: Path, file: str, sums: Sums, path: str) -> dict[str, Tensor]:
    with _damage_of(file, path):
        tensors = safetensors.torch.load(_read_bytes(folder, file, sums))
        if (key := _not_finite(tensors)) is not None:
            raise ValueError(f"{key} must hold finite numbers, and some are NaN or infinite")
    return tensors


def _not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Name of the first tensor with NaN or infinity; None if there is none."""
    found = (key for key, value in tensors.items() if not bool(torch.isfinite(value).all()))
    return next(found, None)


def _read_bytes(folder: Path, name: str, sums: Sums) -> bytes:
    file = folder / name
    # Reading a pipe would wait for ever, reading a device never end.
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("it must be a regular file")
    content = file.read_bytes()
    if sums and hashlib.sha256(content).hexdigest() != sums[name]:
        raise ValueError(f"it must have the SHA-256 sum that {DESCRIPTION} states, and has another")
    return content


@contextlib.contextmanager
def _damage_of(file: str, path: str) -> Iterator[None]:
    """Turn every error of reading and parsing `file` into a `CheckpointError` that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except PermissionError as error:
        raise CheckpointError(
            f"the checkpoint {path!r} must be readable, and {file} is not: {error}."
        ) from error
    # Whatever a damaged file makes a parser raise: json a RecursionError, safetensors an error of
    # its own or a KeyError, torch a RuntimeError.
    except Exception as error:
        raise CheckpointError(
            f"the checkpoint {path!r} must be whole, and it is damaged: {file}: "
            f"{type(error).__name__}: {error}. Load another checkpoint."
        ) from error


def _parse(content: bytes) -> dict[str, Any]:
    found = json.loads(content.decode("utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"it must hold a JSON object, got a {type(found).__name__}")  # noqa: TRY004 - `_damage_of` takes all alike
    return found


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode()
