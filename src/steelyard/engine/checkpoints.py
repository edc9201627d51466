"""Checkpoints on disk, by name, in folders that appear whole or not at all.

`<root>/<run>/weights/<name>` is a symbolic link to a hidden folder beside it. A checkpoint is
written into a new hidden folder, its files are flushed to the disk, and then `rename(2)`, which is
atomic, puts a new link in the place of the old one. Whoever follows the link finds a whole
checkpoint, at whatever moment the writer was killed. peft can load the folder too.

Several processes may write, read and delete checkpoints of one name. Of two writers with
`overwrite` both succeed, and the last one's stays; of two without, one does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from steelyard.engine import checkpoint_contents
from steelyard.engine.checkpoint_contents import CheckpointContents, not_found
from steelyard.errors import CheckpointError, InputError
from steelyard.spec.checks import is_finite

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
            raise _taken(run, name)
        files = checkpoint_contents.encode(name, contents)
        folder = link.with_name(f".{name}.{uuid.uuid4().hex}")
        try:
            folder.mkdir(parents=True)
            checkpoint_contents.write(folder, files)
            # The folder may have become old while this process was stopped: a sweep must not take
            # it between here and the link.
            os.utime(folder)
            if overwrite:
                replaced = _replace_link(link, folder)
            else:
                replaced = None
                link.symlink_to(folder.name)  # atomic: it fails if the name was taken meanwhile
            # Before the old folder is removed: a power cut must leave one of the two.
            checkpoint_contents.flush_names(link.parent)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, FileExistsError) and not overwrite and os.path.lexists(link):
                raise _taken(run, name) from None
            raise CheckpointError(
                f"the checkpoint {name!r} must be written to {link.parent}, and that failed: "
                f"{error}. Make room there, or choose another folder; nothing was changed."
            ) from error
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        _sweep(link.parent)
        return f"{SCHEME}{run}/{kind}/{name}"

    def read(self, path: str) -> CheckpointContents:
        """Read the checkpoint at `path`, which `write` returned or which is that of its folder.

        Raises:
            CheckpointError: there is none, it is damaged, or it has expired.
        """
        link = self._find(path)
        while True:
            folder = _resolve(link, path)
            try:
                contents = checkpoint_contents.read(folder, path)
            except CheckpointError:
                if folder == _target(link):
                    raise
            else:
                if folder == _target(link):
                    break
            # A writer replaced the link and may have removed files of the old folder while they
            # were read. Whether that failed or not, read the new folder.
        if _has_expired(contents.info):
            raise CheckpointError(f"path must be that of a checkpoint, and {path!r} has expired.")
        return contents

    def entries(self, run: str | None = None) -> list[CheckpointEntry]:
        """List the checkpoints of a run, or of all, newest first; no damaged or expired ones.

        Raises:
            CheckpointError: the name of the run breaks a rule, or the root cannot be read.
        """
        if run is not None:
            runs = [self._root / check_name("run", run)]
        else:
            try:
                runs = _visible(self._root)
            except OSError as error:
                raise CheckpointError(
                    f"the folder of the checkpoints must be readable, and {self._root} is not: "
                    f"{error}."
                ) from error
        entries = [
            entry
            for folder in runs
            for kind in KINDS
            for link in _links(folder / kind)
            if (entry := _entry(folder.name, kind, link)) is not None
        ]
        return sorted(entries, key=lambda entry: entry.info.get("created_at", 0), reverse=True)

    def delete(self, path: str) -> None:
        """Delete a checkpoint, whole or damaged.

        Raises:
            CheckpointError: there is none, or it cannot be deleted.
        """
        link = self._find(path)
        if not os.path.islink(link):  # noqa: PTH114 - False for a path that cannot be followed
            raise not_found(path)
        folder = _own_folder(link)
        try:
            link.unlink()
        except FileNotFoundError:  # another process deleted it meanwhile
            raise not_found(path) from None
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {path!r} must be in a folder that can be written, and deleting "
                f"it failed: {error}."
            ) from error
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def set_expiry(self, path: str, expires_at: float | None) -> None:
        """Set the time at which a checkpoint expires, of an expired one too; None: never.

        Raises:
            InputError: the time is not a finite number.
            CheckpointError: there is no checkpoint, or it is damaged or cannot be written.
        """
        if expires_at is not None and not is_finite(expires_at):
            raise InputError(f"expires_at must be a finite number or None, got {expires_at!r}.")
        link = self._find(path)
        while True:
            folder = _resolve(link, path)
            try:
                checkpoint_contents.change_info(folder, path, {"expires_at": expires_at})
            except OSError as error:  # a `CheckpointError` is one too
                if folder != _target(link):  # overwritten or deleted meanwhile
                    _remove_replaced(link, folder)
                    continue
                if isinstance(error, CheckpointError):
                    raise
                raise CheckpointError(
                    f"the checkpoint {path!r} must be in a folder that can be written, and "
                    f"setting its expiry failed: {error}."
                ) from error
            _remove_replaced(link, folder)
            return

    def _link(self, run: str, kind: str, name: str) -> Path:
        return self._root / check_name("run", run) / kind / check_name("name", name)

    def _find(self, path: str) -> Path:
        if not isinstance(path, str | Path):
            raise not_found(path)
        if not isinstance(path, str) or not path.startswith(SCHEME):
            try:
                return Path(path).expanduser()
            except RuntimeError as error:  # "~nobody" has no home
                raise not_found(path, error) from error
        parts = path.removeprefix(SCHEME).split("/")
        if len(parts) != 3 or parts[1] not in KINDS:  # noqa: PLR2004
            raise CheckpointError(
                f"path must look like {SCHEME}run/weights/name or "
                f"{SCHEME}run/sampler_weights/name, got {path!r}."
            )
        return self._link(*parts)


def remove_checkpoint(link: Path) -> None:
    """Remove a checkpoint of a run folder, and nothing that is not its own.

    That is a link with the hidden folder beside it that `write` made; a link to anywhere else
    without what it leads to; or a folder in the place of a link, of a copy of a run that was made
    with the files that links lead to.

    Raises:
        OSError: it cannot be removed.
    """
    if not link.is_symlink():
        shutil.rmtree(link, ignore_errors=True)
        return
    folder = _own_folder(link)
    link.unlink(missing_ok=True)
    if folder is not None and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)


def check_name(what: str, value: object) -> str:
    """Check that a run or a checkpoint may have the name `value`, and return it.

    Raises:
        CheckpointError: it is not a safe name for a folder.
    """
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise CheckpointError(
            f"the {what} of a checkpoint must be 1 to 200 letters, digits or ._:- that "
            f"start with a letter, a digit or _, got {value!r}."
        )
    return value


def _taken(run: str, name: str) -> CheckpointError:
    return CheckpointError(
        f"name must be free, and {run} has a checkpoint {name!r} already: choose another, "
        f"or pass overwrite=True."
    )


def _replace_link(link: Path, folder: Path) -> Path | None:
    """Link to a folder, in the place of an earlier link; return the folder that it had."""
    fresh = link.with_name(f"{folder.name}.link")
    fresh.symlink_to(folder.name)
    try:
        with _locked(link.parent):
            old = _own_folder(link)
            fresh.replace(link)  # the atomic step: readers see the old checkpoint or the new one
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    return old


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one writer at a time replace a link in `folder`, so that each knows what it replaced.

    Where folders cannot be locked, as on some network file systems, the folder that lost a race
    stays until it is swept.
    """
    descriptor = None
    with contextlib.suppress(ImportError, OSError):
        import fcntl  # noqa: PLC0415 - Unix alone has it

        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # releases the lock


def _resolve(link: Path, path: str) -> Path:
    """Folder that a link leads to.

    Raises:
        CheckpointError: there is none, or its path cannot be followed.
    """
    while True:
        folder = _own_folder(link)
        try:
            return link.resolve(strict=True)
        except FileNotFoundError:
            # Between the link and its folder, a writer may have replaced the one and removed the
            # other. Follow the new link.
            if folder == _own_folder(link):
                raise not_found(path) from None
        # A loop is a RuntimeError until Python 3.13; a NUL in the path is a ValueError.
        except (OSError, RuntimeError, ValueError) as error:
            raise not_found(path, error) from error


def _target(link: Path) -> Path | None:
    try:
        return link.resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None


def _own_folder(link: Path) -> Path | None:
    """Hidden folder beside a link that it leads to; None for a link to anywhere else.

    A link that a user has put in the place of a checkpoint may lead to files of theirs.
    """
    try:
        target = str(link.readlink())
    except (OSError, ValueError):
        return None
    is_own = target.startswith(f".{link.name}.") and os.sep not in target
    return link.with_name(target) if is_own else None


def _remove_replaced(link: Path, folder: Path) -> None:
    """Remove a folder if a writer has replaced it; it may have failed to, as it was written to."""
    is_replaced = _target(link) not in (None, folder)
    if is_replaced and folder.name.startswith(f".{link.name}."):
        shutil.rmtree(folder, ignore_errors=True)


def _has_expired(info: Mapping[str, Any]) -> bool:
    expires = info.get("expires_at")
    return expires is not None and expires < time.time()


def _visible(parent: Path) -> list[Path]:
    """Entries of a folder that are not hidden; none if it does not exist."""
    try:
        return sorted(entry for entry in parent.iterdir() if not entry.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _links(parent: Path) -> list[Path]:
    """Checkpoints in a folder; none if it cannot be read, so that other runs are still listed."""
    try:
        return _visible(parent)
    except OSError:
        return []


def _entry(run: str, kind: Kind, link: Path) -> CheckpointEntry | None:
    """Entry of the checkpoint at `link`; None if it is damaged, expired or was just deleted."""
    while True:
        try:
            folder = _resolve(link, link.name)
        except CheckpointError:
            return None
        try:
            info = checkpoint_contents.read_info(folder, link.name)
            size = _size_of(folder)
        except (OSError, RuntimeError):
            if folder == _target(link):
                return None
            continue  # overwritten meanwhile
        return None if _has_expired(info) else CheckpointEntry(run, kind, link.name, info, size)


def _size_of(folder: Path) -> int:
    """Bytes of the files in a folder; one that is renamed meanwhile, by `set_expiry`, counts 0."""
    size = 0
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def _sweep(folder: Path) -> None:
    """Remove hidden folders and links that killed writers left more than an hour ago.

    Other writers and sweepers are at work in the folder too: an entry that is gone when its turn
    comes was removed or renamed by one of them, and is skipped.
    """
    with contextlib.suppress(OSError):
        linked = {_target(entry) for entry in _visible(folder)}
        for entry in folder.iterdir():
            if entry.name.startswith(".") and _target(entry) not in linked - {None}:
                _remove_if_old(entry)


def _remove_if_old(entry: Path) -> None:
    with contextlib.suppress(OSError):
        if time.time() - entry.lstat().st_mtime > _ABANDONED:
            entry.unlink() if entry.is_symlink() else shutil.rmtree(entry, ignore_errors=True)
