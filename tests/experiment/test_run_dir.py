from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.errors import CheckpointError, RunError
from steelyard.experiment import RunFolder, read_config
from steelyard.experiment.checkpointing import latest_checkpoint
from steelyard.experiment.run_dir import write_atomic
from steelyard.experiment.secrets import redact


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "train.jsonl").write_text("")
    made = RunFolder(tmp_path / "run")
    with made.locked():
        made.begin(read_config({"data": {"path": "train.jsonl"}}, folder=tmp_path))
    return made


def test_a_config_comes_back_as_it_was(run: RunFolder, tmp_path: Path) -> None:
    assert run.config() == read_config({"data": {"path": "train.jsonl"}}, folder=tmp_path)


def test_a_second_run_is_refused(run: RunFolder) -> None:
    with pytest.raises(RunError, match="must be empty or new, and it holds a run: go on with"):
        run.begin(run.config())


def test_a_folder_in_use_is_refused(run: RunFolder) -> None:
    with (
        run.locked(),
        pytest.raises(RunError, match="must be used by one process at a time"),
        RunFolder(run.path).locked(),
    ):
        pass


def test_metrics_are_cut_to_a_size(run: RunFolder) -> None:
    run.append({"step": 0})
    size = run.measured()
    run.append({"step": 1})
    with run.metrics_file.open("a") as file:
        file.write('{"st')
    run.cut(size)
    assert run.metrics() == [{"step": 0}]
    with pytest.raises(RunError, match=f"must hold the {size + 1} bytes written before"):
        run.cut(size + 1)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(RunError, match=r"must be writable, and that failed: .* Free space there\."):
        write_atomic(target, b"x")
    assert list(tmp_path.iterdir()) == [target]


def test_a_damaged_record_is_named(run: RunFolder) -> None:
    assert latest_checkpoint(run) is None
    run.checkpoints.mkdir()
    (run.checkpoints / "step-00000001.json").write_text('{"step": 1}')
    with pytest.raises(CheckpointError, match=r"step-00000001\.json must be a whole record"):
        latest_checkpoint(run)


def test_secrets_are_blanked_out(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-0123")
    assert redact("key tml-0123.") == "key ***."
    run.log("refused: tml-0123")
    run.append({"reason": "tml-0123"})
    run.finish({"key": "tml-0123"})
    assert not [f for f in run.path.iterdir() if b"tml-0123" in f.read_bytes()]
    assert json.loads((run.path / "result.json").read_text()) == {"key": "***"}
    monkeypatch.setenv("TINKER_API_KEY", "a")
    assert redact("a b a") == "a b a", "what short keys would blank out is not worth it"
