"""JSON Lines files: malformed lines are named by file and number."""

from __future__ import annotations

from pathlib import Path

import pytest

from steelyard.errors import DataError
from steelyard.experiment.data.encoding import Encoder
from steelyard.experiment.data.files import read_records


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "must be JSON, and it is not: "),
        (b"3", "must be an object"),
        (b'{"text": "a"}', "must have the keys of"),
        (b'{"prompt": "\xff", "completion": "b"}', "must be UTF-8, and it is not"),
        (b'{"chosen": "a", "rejected": "b"}', "must be of one kind with line 1, completion, got"),
        (b"[" * 100_000, "must be"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(
    plain: Encoder, tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\r\n\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        read_records(path, plain.encode, skip_bad=False)
    assert str(caught.value).startswith(f"{path}:3: {message}")
    found = read_records(path, plain.encode, skip_bad=True)
    assert (len(found.groups), len(found.skipped)) == (1, 1)
    assert found.lines == [1]


def test_numbers_of_lines_are_those_in_the_file(plain: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    good = b'{"prompt": "a", "completion": "b"}\n'
    path.write_bytes(b"\n" + good + b"{\n\n" + good)
    assert read_records(path, plain.encode, skip_bad=True).lines == [2, 5]


def test_a_byte_order_mark_is_ignored(plain: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "completion": "b"}\n')
    assert read_records(path, plain.encode, skip_bad=False).lines == [1]


def test_a_file_without_a_valid_line_is_an_error(plain: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n{\n")
    with pytest.raises(DataError, match="must hold at least one usable line, got none"):
        read_records(path, plain.encode, skip_bad=True)
    with pytest.raises(DataError, match="must be a file that can be read"):
        read_records(tmp_path, plain.encode, skip_bad=True)
