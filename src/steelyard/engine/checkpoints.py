"""Checkpoints on disk: safetensors and JSON, in folders that appear whole or not at all.

`<root>/<run>/weights/<name>` is a symbolic link to a hidden folder beside it. A checkpoint is
written into a new hidden folder, its files are flushed to the disk, and then `rename(2)`, which is
atomic, puts a new link in the place of the old one. Whoever follows the link finds a whole
checkpoint, at whatever moment the writer was killed. peft can load the folder too.
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

from steelyard.engine.checkpoint_contents import CheckpointContents
from steelyard.errors import CheckpointError

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")

SCHEME = "tinker://"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,199}")
_ABANDONED = 3600  # seconds after which the writer of an unlinked folder counts as killed


@dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in a listing, without its weights.

    Attributes:
        run: the training run.
        kind: `"weights"` with an optimizer, `"sampler_weights"` without.
        name: the name it was saved with.
        info: its `CheckpointContents.info`.
        size: the bytes of its files.
    """

    run: str
    kind: Kind
    name: str
    info: Mapping[str, Any]
    size: int

    @property
    def path(self) -> str:
        """Path in the SDK's form, `tinker://run/kind/name`."""
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


class Checkpoints:
    """Checkpoints under one root folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(
        self, run: str, kind: Kind, name: str, contents: CheckpointContents, *, overwrite: bool
    ) -> str:
        """Write a checkpoint and return its path in the SDK's form.

        Raises:
            CheckpointError: the name is taken, `contents.info` is no JSON, or the disk is full
                or cannot be written.
        """
        link = self._link(run, kind, name)
        if not overwrite and os.path.lexists(link):
            raise CheckpointError(
                f"name must be free, and {run} has a checkpoint {name!r} already: choose another, "
                f"or pass overwrite=True."
            )
        files = _files(name, contents)
        folder = link.with_name(f".{name}.{uuid.uuid4().hex}")
        fresh = link.with_name(f"{folder.name}.link")
        try:
            folder.mkdir(parents=True)
            _write_files(folder, files)
            fresh.symlink_to(folder.name)
            old = _target(link)
            fresh.replace(link)  # the atomic step: readers see the old checkpoint or the new one
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

    def read(self, path: str) -> CheckpointContents:
        """Read the checkpoint at `path`, which `write` returned or which is that of its folder.

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
            # A writer replaced the link and may have removed files of the old folder while they
            # were read. Whether that failed or not, read the new folder.
        expires = found.info.get("expires_at")
        if expires is not None and expires < time.time():
            raise CheckpointError(f"path must be that of a checkpoint, and {path!r} has expired.")
        return found

    def entries(self, run: str | None = None) -> list[CheckpointEntry]:
        """List the checkpoints of a run, or of all, newest first; no damaged or expired ones."""
        runs = [self._root / check_name("run", run)] if run is not None else _folders(self._root)
        found = [
            entry
            for folder in runs
            for kind in KINDS
            for link in _folders(folder / kind)
            if (entry := _entry(folder.name, kind, link)) is not None
        ]
        return sorted(found, key=lambda entry: entry.info.get("created_at", 0), reverse=True)

    def delete(self, path: str) -> None:
        """Delete a checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        link = self._find(path)
        folder = _target(link)
        if folder is None or not link.is_symlink():
            raise _not_found(path)
        link.unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        """Set the time at which a checkpoint expires; None: never.

        Raises:
            CheckpointError: there is none.
        """
        folder = _target(self._find(path))
        if folder is None:
            raise _not_found(path)
        info = {**self.read(path).info, "expires_at": expires_at}
        fresh = folder / f".checkpoint.{uuid.uuid4().hex}"
        _write_files(folder, {fresh.name: _json(info)})
        fresh.replace(folder / "checkpoint.json")  # atomic, as in `write`

    def _link(self, run: str, kind: str, name: str) -> Path:
        return self._root / check_name("run", run) / kind / check_name("name", name)

    def _find(self, path: str) -> Path:
        if not isinstance(path, str | Path):
            raise _not_found(path)
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
    """Check that a run or a checkpoint may have the name `value`, and return it.

    Raises:
        CheckpointError: it is not a safe name for a folder.
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


def _files(name: str, contents: CheckpointContents) -> dict[str, bytes]:
    try:
        json_files = {
            "adapter_config.json": _json(contents.config),
            "checkpoint.json": _json(contents.info),
        }
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"what is saved with the checkpoint {name!r} must be ready for JSON, and it is not: "
            f"{error}"
        ) from error
    tensors = {"adapter_model.safetensors": contents.weights}
    if contents.optimizer_state is not None:
        tensors["optimizer.safetensors"] = contents.optimizer_state
    return {name: safetensors.torch.save(dict(t)) for name, t in tensors.items()} | json_files


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        with (folder / name).open("wb") as file:
            file.write(content)
            # The data must be on the disk before the link is, or a power cut could leave a link to
            # empty files.
            file.flush()
            os.fsync(file.fileno())


def _read_files(folder: Path | None, path: str) -> CheckpointContents:
    if folder is None or not (folder / "checkpoint.json").is_file():
        raise _not_found(path)
    optimizer = folder / "optimizer.safetensors"
    try:
        info = json.loads((folder / "checkpoint.json").read_text("utf-8"))
        if not isinstance(info, dict) or not {"base_model", "lora"} <= info.keys():
            raise ValueError("checkpoint.json does not say what was trained")  # noqa: TRY301
        return CheckpointContents(
            info=info,
            weights=_read_tensors(folder / "adapter_model.safetensors"),
            optimizer_state=_read_tensors(optimizer) if optimizer.is_file() else None,
            config=json.loads((folder / "adapter_config.json").read_text("utf-8")),
        )
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {path!r} must be whole, and it is damaged: "
            f"{type(error).__name__}: {error}"
        ) from error


def _read_tensors(file: Path) -> dict[str, Tensor]:
    return safetensors.torch.load(file.read_bytes())


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(entry for entry in parent.iterdir() if not entry.name.startswith("."))


def _entry(run: str, kind: Kind, link: Path) -> CheckpointEntry | None:
    """Entry of the checkpoint at `link`; None if it is damaged, expired or was just deleted."""
    try:
        info = json.loads((link / "checkpoint.json").read_text("utf-8"))
        size = sum(file.stat().st_size for file in link.iterdir())
        expires = info.get("expires_at")
        whole = "base_model" in info and isinstance(info.get("lora"), dict)
    except (OSError, ValueError, AttributeError):
        return None
    if not whole or (expires is not None and expires < time.time()):
        return None
    return CheckpointEntry(run, kind, link.name, info, size)


def _json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode()


def _not_found(path: object) -> CheckpointError:
    return CheckpointError(f"path must be that of a checkpoint, and {path!r} is none.")


def _sweep(folder: Path) -> None:
    """Remove hidden folders and links that killed writers left more than an hour ago."""
    linked = {_target(entry) for entry in folder.iterdir() if not entry.name.startswith(".")}
    for entry in folder.iterdir():
        abandoned = entry.name.startswith(".") and entry.resolve() not in linked
        if abandoned and time.time() - entry.lstat().st_mtime > _ABANDONED:
            entry.unlink() if entry.is_symlink() else shutil.rmtree(entry, ignore_errors=True)
