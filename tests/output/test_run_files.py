"""Files of a run folder: what is said, and what is left, where one cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.output.run_files import RunFiles, write_atomic


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.metrics_file.mkdir()
    with pytest.raises(RunError, match=r"must be writable, and that failed: .*metrics\.jsonl"):
        files.append({"step": 0})


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_write_that_is_interrupted_leaves_the_file_and_no_other(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int) -> None:
        raise error

    file = tmp_path / "config.json"
    write_atomic(file, b"first")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(error):
        write_atomic(file, b"second")
    assert (file.read_bytes(), [*tmp_path.iterdir()]) == (b"first", [file])
