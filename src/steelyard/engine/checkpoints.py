"""Checkpoints on disk: safetensors and JSON, in folders that appear whole or not at all.

`<root>/<run>/weights/<name>` is a link to a hidden folder beside it. A checkpoint is written
into a new hidden folder and then the link is put in place in one move, over the old one if
there is one: whoever follows the link finds a whole checkpoint, whenever the writer was killed.
The folder is also one that peft can load.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
from torch import Tensor

from steelyard.errors import CheckpointError

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")

SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}")
_ABANDONED = 3600  # seconds after which nobody is still writing into a folder


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        info: what was trained, how, and whatever is saved with it; ready for JSON.
        weights: the adapter's, by key.
        moments: the optimizer's; None in a checkpoint for sampling.
        config: the adapter's settings as peft writes them.
    """

    info: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor] | None
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Listed:
    """A checkpoint that was found, without its weights.

    Attributes:
        run: the training run.
        kind: what it is for.
        name: the name it was saved with.
        info: what is saved with it.
        size: the bytes of its files.
    """

    run: str
    kind: Kind
    name: str
    info: Mapping[str, Any]
    size: int

    @property
    def path(self) -> str:
        """As the SDK writes paths."""
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


class Checkpoints:
    """The checkpoints under one root folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(
        self, run: str, kind: Kind, name: str, checkpoint: Checkpoint, *, overwrite: bool
    ) -> str:
        """Write a checkpoint; its path as the SDK writes paths.

        Raises:
            CheckpointError: the name is taken, something in it cannot be saved, or the disk
                refuses.
        """
        link = self._link(run, kind, name)
        if not overwrite and os.path.lexists(link):
            raise CheckpointError(
                f"name must be free, and {run} has a checkpoint {name!r} already: choose another, "
                f"or pass overwrite=True."
            )
        files = _files(name, checkpoint)
        folder = link.with_name(f".{name}.{uuid.uuid4().hex}")
        fresh = link.with_name(f"{folder.name}.link")
        try:
            folder.mkdir(parents=True)
            _write_files(folder, files)
            fresh.symlink_to(folder.name)
            old = _target(link)
            fresh.replace(link)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint {name!r} must be written to {link.parent}, and that failed: "
                f"{error}. Make room there, or choose another folder; nothing was changed."
            ) from error
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        _sweep(link.parent)
        return f"{SCHEME}{run}/{kind}/{name}"

    def read(self, path: str) -> Checkpoint:
        """The checkpoint at `path`: what `write` gave, or the path of its folder.

        Raises:
            CheckpointError: there is none, it is damaged, or it has expired.
        """
        link = self._find(path)
        while True:
            folder = _target(link)
            try:
                found = _read_files(folder, path)
            except CheckpointError:
                if folder == _target(link):
                    raise
            else:
                if folder == _target(link):
                    break
            # Replaced while it was read, perhaps half of it: read the new one.
        expires = found.info.get("expires_at")
        if expires is not None and expires < time.time():
            raise CheckpointError(f"path must be that of a checkpoint, and {path!r} has expired.")
        return found

    def listed(self, run: str | None = None) -> list[Listed]:
        """The whole checkpoints of a run, or of all, that have not expired; the newest first."""
        runs = [self._root / check_name("run", run)] if run is not None else _folders(self._root)
        found = [
            listed
            for folder in runs
            for kind in KINDS
            for entry in _folders(folder / kind)
            if (listed := _listed(folder.name, kind, entry)) is not None
        ]
        return sorted(found, key=lambda listed: listed.info.get("created_at", 0), reverse=True)

    def delete(self, path: str) -> None:
        """Remove a checkpoint, at once and for good.

        Raises:
            CheckpointError: there is none.
        """
        link = self._find(path)
        folder = _target(link)
        if folder is None or not link.is_symlink():
            raise _none(path)
        link.unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        """Let a checkpoint expire at a time, or never.

        Raises:
            CheckpointError: there is none.
        """
        folder = _target(self._find(path))
        if folder is None:
            raise _none(path)
        info = {**self.read(path).info, "expires_at": expires_at}
        fresh = folder / f".checkpoint.{uuid.uuid4().hex}"
        _write_files(folder, {fresh.name: _json(info)})
        fresh.replace(folder / "checkpoint.json")

    def _link(self, run: str, kind: str, name: str) -> Path:
        return self._root / check_name("run", run) / kind / check_name("name", name)

    def _find(self, path: str) -> Path:
        if not isinstance(path, str | Path):
            raise _none(path)
        if not isinstance(path, str) or not path.startswith(SCHEME):
            return Path(path).expanduser()
        parts = path.removeprefix(SCHEME).split("/")
        if len(parts) != 3 or parts[1] not in KINDS:  # noqa: PLR2004
            raise CheckpointError(
                f"path must look like {SCHEME}run/weights/name or "
                f"{SCHEME}run/sampler_weights/name, got {path!r}."
            )
        return self._link(*parts)


def check_name(what: str, value: object) -> str:
    """`value`, if a run or a checkpoint may be called so: it is a folder's name.

    Raises:
        CheckpointError: it may not.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise CheckpointError(
            f"the {what} of a checkpoint must be 1 to 200 letters, digits or ._:- that "
            f"start with a letter or a digit, got {value!r}."
        )
    return value


def _target(link: Path) -> Path | None:
    try:
        return link.resolve(strict=True)
    except OSError:
        return None


def _files(name: str, checkpoint: Checkpoint) -> dict[str, bytes]:
    try:
        described = {
            "adapter_config.json": _json(checkpoint.config),
            "checkpoint.json": _json(checkpoint.info),
        }
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"what is saved with the checkpoint {name!r} must be ready for JSON, and it is not: "
            f"{error}"
        ) from error
    tensors = {"adapter_model.safetensors": checkpoint.weights}
    if checkpoint.moments is not None:
        tensors["optimizer.safetensors"] = checkpoint.moments
    return {file: safetensors.torch.save(dict(held)) for file, held in tensors.items()} | described


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def _read_files(folder: Path | None, path: str) -> Checkpoint:
    if folder is None or not (folder / "checkpoint.json").is_file():
        raise _none(path)
    moments = folder / "optimizer.safetensors"
    try:
        info = json.loads((folder / "checkpoint.json").read_text("utf-8"))
        if not isinstance(info, dict) or not {"base_model", "lora"} <= info.keys():
            raise ValueError("checkpoint.json does not say what was trained")  # noqa: TRY301
        return Checkpoint(
            info=info,
            weights=safetensors.torch.load((folder / "adapter_model.safetensors").read_bytes()),
            moments=safetensors.torch.load(moments.read_bytes()) if moments.is_file() else None,
            config=json.loads((folder / "adapter_config.json").read_text("utf-8")),
        )
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {path!r} must be whole, and it is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(entry for entry in parent.iterdir() if not entry.name.startswith("."))


def _listed(run: str, kind: Kind, link: Path) -> Listed | None:
    """A checkpoint by its link; None if it is damaged, has expired, or was just removed."""
    try:
        info = json.loads((link / "checkpoint.json").read_text("utf-8"))
        size = sum(file.stat().st_size for file in link.iterdir())
        expires = info.get("expires_at")
        whole = "base_model" in info and isinstance(info.get("lora"), dict)
    except (OSError, ValueError, AttributeError):
        return None
    if not whole or (expires is not None and expires < time.time()):
        return None
    return Listed(run, kind, link.name, info, size)


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode()


def _none(path: object) -> CheckpointError:
    return CheckpointError(f"path must be that of a checkpoint, and {path!r} is none.")


def _sweep(folder: Path) -> None:
    """Remove what writers that were killed have left, once it is old."""
    linked = {_target(entry) for entry in folder.iterdir() if not entry.name.startswith(".")}
    for entry in folder.iterdir():
        abandoned = entry.name.startswith(".") and entry.resolve() not in linked
        if abandoned and time.time() - entry.lstat().st_mtime > _ABANDONED:
            entry.unlink() if entry.is_symlink() else shutil.rmtree(entry, ignore_errors=True)
