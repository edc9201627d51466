"""Copies of a folder that changes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from steelyard.experiment.on_ray import folder_changes
from steelyard.experiment.on_ray.folder_changes import FileChange, FolderChanges, apply, whole


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def content(folder: Path) -> dict[str, bytes | str]:
    return {
        path.relative_to(folder).as_posix(): (
            str(path.readlink()) if path.is_symlink() else path.read_bytes()
        )
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_lines_that_are_appended_are_sent_alone(there: Path, here: Path) -> None:
    looked = FolderChanges(there)
    (there / "metrics.jsonl").write_bytes(b"one\n")
    assert list(looked.changes()) == [FileChange("metrics.jsonl", "write", b"one\n")]
    with (there / "metrics.jsonl").open("ab") as file:
        file.write(b"two\n")
    (found,) = looked.changes()
    assert found == FileChange("metrics.jsonl", "append", b"two\n")
    assert list(looked.changes()) == []
    (here / "metrics.jsonl").write_bytes(b"one\n")
    apply(here, [found])
    assert content(here) == content(there)


def test_a_file_of_before_that_was_cut_and_grew_again_is_sent_whole(there: Path) -> None:
    (there / "metrics.jsonl").write_bytes(b"one\ntwo\n")
    looked = FolderChanges(there)
    looked.skip_present()
    assert list(looked.changes()) == []
    with (there / "metrics.jsonl").open("ab") as file:
        file.truncate(4)
        file.write(b"other\nthree\n")
    expected = FileChange("metrics.jsonl", "write", b"one\nother\nthree\n")
    assert list(looked.changes()) == [expected]


def test_records_follow_their_checkpoints_and_precede_deletions(there: Path, here: Path) -> None:
    looked = FolderChanges(there)
    old, new = there / "checkpoints/a/step-1", there / "checkpoints/a/step-2"
    old.mkdir(parents=True)
    (old / "model").write_bytes(b"1")
    (there / "checkpoints/step-00000001.json").write_bytes(b"{}")
    apply(here, looked.changes())
    shutil.rmtree(old)
    (there / "checkpoints/step-00000001.json").unlink()
    new.mkdir()
    (new / "model").write_bytes(b"2")
    (there / "checkpoints/step-00000002.json").write_bytes(b"{}")
    (there / "adapter").symlink_to("checkpoints/a/step-2")
    (there / "result.json").write_bytes(b"{}")
    found = list(looked.changes())
    assert [(change.kind, change.path) for change in found] == [
        ("link", "adapter"),
        ("write", "checkpoints/a/step-2/model"),
        ("write", "checkpoints/step-00000002.json"),
        ("write", "result.json"),
        ("delete", "checkpoints/step-00000001.json"),
        ("delete", "checkpoints/a/step-1/model"),
    ]
    apply(here, found)
    assert content(here) == content(there)
    assert not (here / "checkpoints/a/step-1").exists()


def test_a_large_file_comes_in_pieces_and_appears_at_once(
    there: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_changes, "_PIECE", 4)
    (there / "model").write_bytes(b"0123456789")
    (there / "empty").write_bytes(b"")
    (here / "model").write_bytes(b"old")
    pieces = whole(there)
    assert [change.data for change in pieces] == [b"", b"0123", b"4567", b"89"]
    for piece in pieces[:-1]:
        apply(here, [piece])
        assert (here / "model").read_bytes() == b"old"
    assert "model" not in [change.path for change in whole(here) if change.data != b"old"]
    apply(here, pieces[-1:])
    assert content(here) == content(there)


def test_the_lock_stays_where_it_is_and_a_missing_folder_is_empty(there: Path) -> None:
    (there / ".lock").touch()
    assert whole(there) == []
    assert whole(there / "missing") == []


def test_a_copy_equals_a_folder_that_changes_at_random(there: Path, here: Path) -> None:
    looked, chance = FolderChanges(there), random.Random(0)
    names = ["a", "b/c", "b/d", "checkpoints/step-00000003.json", "e/f/g"]
    for _ in range(200):
        path = there / chance.choice(names)
        match chance.randrange(5):
            case 0:
                path.unlink(missing_ok=True)
            case 1 | 2:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(chance.randbytes(chance.randrange(20)))
            case 3 if path.exists():
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size // 2)
            case 4:
                path.parent.mkdir(parents=True, exist_ok=True)
                fresh = path.with_name("fresh")
                fresh.write_bytes(chance.randbytes(8))
                fresh.replace(path)
        apply(here, looked.changes())
        assert content(here) == content(there)
