"""Whether a process trains a run, from the locks that processes of this machine hold."""

from __future__ import annotations

from pathlib import Path

_LOCKS = Path("/proc/locks")


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a run folder; None if that is not known.

    It is known on Linux, for processes of this machine.
    """
    if not _LOCKS.is_file():
        return None
    return inode_of(folder / ".lock") in locked_files()


def inode_of(file: Path) -> int | None:
    """Inode of a file; None if there is none."""
    try:
        return file.lstat().st_ino
    except OSError:
        return None


def locked_files() -> frozenset[int]:
    """Inodes of the files that processes of this machine have locked; empty if not on Linux.

    `RunFolder.locked` cannot be asked: to try a lock is to hold it for a moment, in which a run
    that begins would be refused.
    """
    try:
        lines = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return frozenset()
    # "1: FLOCK  ADVISORY  WRITE 4711 fe:01:131079 0 EOF": device and inode are the only field with
    # two colons. A process that waits for a lock has "->" after the number.
    held = [line.split() for line in lines if "->" not in line]
    files = [field for fields in held for field in fields if field.count(":") == 2]  # noqa: PLR2004
    return frozenset(int(file.rpartition(":")[2]) for file in files)
