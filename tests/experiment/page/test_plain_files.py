from __future__ import annotations

import os
from pathlib import Path

import pytest

from steelyard.experiment.page.plain_files import (
    open_plain,
    parse_object,
    read_first_line,
    read_last,
    read_last_objects,
    read_tail,
)


def last_line(path: Path) -> bytes | None:
    return read_last(path, lambda line: line or None)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("secret\n")
    path = tmp_path / kind
    if kind == "link":
        path.symlink_to(tmp_path / "secret")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError, match=r".+"):
        open_plain(path)
    assert (read_first_line(path), last_line(path)) == (b"", None)
    assert read_tail(path, 99) == (b"", True)


@pytest.mark.parametrize("length", [10, 2**16 - 1, 2**16, 300_000])
def test_first_and_last_line(file: Path, length: int) -> None:
    first, last = b"a" * length, b"b" * length
    file.write_bytes(first + b"\nmiddle\n" + last + b"\n")
    assert read_first_line(file) == first + b"\n"
    assert last_line(file) == last


def test_an_incomplete_line_is_left_out(file: Path) -> None:
    file.write_bytes(b'{"step": 0}')
    assert (read_first_line(file), last_line(file)) == (b"", None)
    file.write_bytes(b'{"step": 0}\n{"step"')
    assert last_line(file) == b'{"step": 0}'


@pytest.mark.parametrize("damaged", [1, 40_000])
def test_the_last_object_stands_before_damaged_lines(file: Path, damaged: int) -> None:
    file.write_bytes(b'{"step": 0}\n{"step": 1}\n' + b"rubbish\n" * damaged)
    assert read_last(file, parse_object) == {"step": 1}
    file.write_bytes(b"rubbish\n" * damaged)
    assert read_last(file, parse_object) is None


def test_last_objects_leave_out_what_is_cut_or_damaged(file: Path) -> None:
    file.write_bytes(b'{"a": 1}\n{"a": NaN, "b": 1e999}\nrubbish\n[2]\n{"a": 3}\n{"a"')
    found = [{"a": 1}, {"a": None, "b": None}, {"a": 3}]
    assert read_last_objects(file, 1000) == (found, True)
    # The tail begins inside the first line.
    assert read_last_objects(file, file.stat().st_size - 4) == (found[1:], False)


@pytest.mark.parametrize("text", [b"", b"1", b"{", b"\xff", b"[" * 100_000, b'"x"'])
def test_what_is_no_object(text: bytes) -> None:
    assert parse_object(text) is None
