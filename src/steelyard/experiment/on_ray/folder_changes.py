"""Copy a folder while it changes: find what has changed, and apply that to the copy.

Files that are replaced are sent whole, and appear in the copy at once; lines that are appended to a
file are sent alone. Changes come in an order in which the copy of a run folder can be resumed after
each of them: a checkpoint before its record, and the record before older checkpoints are deleted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

_PIECE = 32 * 2**20  # bytes of a file in one change
_NOT_COPIED = (".lock",)
_PART = ".steelyard-part"
_RECORD, _RESULT = "checkpoints/*.json", "result.json"

Content: TypeAlias = Callable[[str, bytes], bytes]


@dataclass(frozen=True)
class FileChange:
    """One change of a folder.

    Attributes:
        path: path of the file in the folder, with slashes.
        kind: `"write"` a piece of a file that takes the place of an older one, `"append"` to a
            file, `"link"` a path to another, or `"delete"`.
        data: the bytes; of a link the path that it leads to.
        first: whether this is the first piece of a file.
        last: whether it is the last one.
    """

    path: str
    kind: Literal["write", "append", "link", "delete"]
    data: bytes = b""
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class _Seen:
    inode: int
    size: int
    modified: int
    link: str | None
    sent: bool = field(default=False, compare=False)  # from here, and not only known to be there


@dataclass
class FolderChanges:
    """Changes of a folder since it was last looked at.

    Look while nothing is being written to the folder: a file must be whole.

    Attributes:
        folder: the folder.
        convert: called with the path and the content of a file that is sent.
    """

    folder: Path
    convert: Content = lambda _, data: data
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def skip_present(self) -> None:
        """Count what the folder holds as known to the other side."""
        self._seen = _look(self.folder)

    def changes(self) -> Iterator[FileChange]:
        """Yield what has changed, in the order in which it is to be applied."""
        before, now = self._seen, _look(self.folder)
        changed = [path for path, seen in now.items() if before.get(path) != seen]
        for path in sorted(changed, key=_order):
            yield from self._send(path, before.get(path), now[path])
            before[path] = replace(now[path], sent=True)
        for path in sorted(before.keys() - now.keys(), key=_order, reverse=True):
            yield FileChange(path, "delete")
            del before[path]

    def _send(self, path: str, before: _Seen | None, now: _Seen) -> Iterator[FileChange]:
        if now.link is not None:
            yield FileChange(path, "link", os.fsencode(now.link))
            return
        # A file that was there before is sent whole once: a resumed run first cuts its metrics, and
        # may have appended more than that when it is looked at.
        start = 0
        if before is not None and before.sent and before.inode == now.inode:
            start = before.size if before.size <= now.size else 0
        kind: Literal["append", "write"] = "append" if start else "write"
        with (self.folder / path).open("rb") as file:
            file.seek(start)
            for offset in range(start, max(now.size, start + 1), _PIECE):
                data = file.read(min(_PIECE, now.size - offset))
                first, last = offset == start, offset + _PIECE >= now.size
                yield FileChange(path, kind, self.convert(path, data), first, last)


def whole(folder: Path, convert: Content = lambda _, data: data) -> list[FileChange]:
    """Changes that make an empty folder a copy of this one; none if there is no such folder."""
    return list(FolderChanges(folder, convert).changes()) if folder.is_dir() else []


def apply(folder: Path, changes: Iterable[FileChange]) -> None:
    """Make the changes in a copy of the folder that they come from."""
    for change in changes:
        path = folder / PurePosixPath(change.path)
        match change.kind:
            case "write":
                _write(path, change)
            case "append":
                with path.open("ab") as file:
                    file.write(change.data)
            case "link":
                _link(path, os.fsdecode(change.data))
            case "delete":
                path.unlink(missing_ok=True)
                _remove_empty(path.parent, folder)


def _write(path: Path, change: FileChange) -> None:
    part = path.with_name(f".{path.name}{_PART}")
    if change.first:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    with part.open("wb" if change.first else "ab") as file:
        file.write(change.data)
        if change.last:
            file.flush()
            os.fsync(file.fileno())
    if change.last:
        part.replace(path)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}{_PART}")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    part.replace(path)


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _look(folder: Path) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        for name in (*files, *links):
            path = Path(parent) / name
            if name in _NOT_COPIED or name.endswith(_PART):
                continue
            status = path.lstat()
            link = str(path.readlink()) if path.is_symlink() else None
            relative = path.relative_to(folder).as_posix()
            found[relative] = _Seen(status.st_ino, status.st_size, status.st_mtime_ns, link)
    return found


def _order(path: str) -> tuple[int, str]:
    """Place of a file among those that change together: records after all else, the result last."""
    pure = PurePosixPath(path)
    return (2 if path == _RESULT else 1 if pure.match(_RECORD) else 0, path)
