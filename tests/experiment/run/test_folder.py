"""Files of a run folder: the lock, the config, metrics, samples and the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError, RunError
from steelyard.experiment import RunFolder, read_config
from steelyard.output.run_files import write_file


def test_a_config_is_read_back_unchanged(run: RunFolder, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    message = r"must be a folder that can be written: .*\. Choose another folder\."
    with pytest.raises(RunError, match=message), RunFolder(tmp_path / name).locked():
        pass


def test_an_error_inside_the_lock_is_not_one_of_the_folder(run: RunFolder) -> None:
    with pytest.raises(PermissionError, match="own"), run.locked():
        raise PermissionError("own")


def test_metrics_are_truncated_to_a_size(run: RunFolder) -> None:
    run.append({"step": 0})
    size = run.measured()
    run.append({"step": 1})
    with run.metrics_file.open("a") as file:
        file.write('{"st')
    run.cut(size)
    assert run.metrics() == [{"step": 0}]
    with pytest.raises(RunError, match=f"must hold the {size + 1} bytes written before"):
        run.cut(size + 1)


def test_drivers_are_cut_at_a_step(run: RunFolder) -> None:
    run.cut_records(0)  # there are none yet
    run.append_drivers([{"step": 0, "term": "a"}, {"step": 0, "term": "é\u2028"}])
    run.append_drivers([])
    run.append_drivers([{"step": 2, "term": "a"}])
    run.cut_records(3)
    assert [record["step"] for record in run.drivers()] == [0, 0, 2]
    with (run.path / "drivers.jsonl").open("a") as file:
        file.write('{"step": 1, "te')  # killed while it wrote
    run.cut_records(2)
    assert run.drivers() == [{"step": 0, "term": "a"}, {"step": 0, "term": "é\u2028"}]
    run.cut_records(0)
    assert run.drivers() == []


def test_damaged_drivers_are_an_error(run: RunFolder) -> None:
    (run.path / "drivers.jsonl").write_text("{\n")
    with pytest.raises(RunError, match=r"drivers\.jsonl must be JSON, and it is damaged"):
        run.cut_records(1)


def test_a_failed_write_leaves_no_file_behind(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(RunError, match=r"must be writable, and that failed: .* Free space there\."):
        write_file(target, b"x")
    assert list(tmp_path.iterdir()) == [target]


def test_files_of_a_run_hold_no_secret(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-0123")
    run.log("refused: tml-0123")
    run.append({"reason": "tml-0123"})
    run.finish({"key": "tml-0123"})
    assert not [f for f in run.path.iterdir() if b"tml-0123" in f.read_bytes()]
    assert json.loads((run.path / "result.json").read_text()) == {"key": "***"}


def test_a_write_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    write_file(target, b"first")
    write_file(target, b"second")
    assert target.read_bytes() == b"second"
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_without_a_run_has_no_config(tmp_path: Path) -> None:
    empty = RunFolder(tmp_path / "empty")
    assert not empty.holds_run
    assert (empty.metrics(), empty.samples(), empty.result()) == ([], [], None)
    with pytest.raises(RunError, match=r"must be the folder of a run, with a config\.json"):
        empty.config()


def test_a_damaged_config_is_an_error(run: RunFolder) -> None:
    (run.path / "config.json").write_text('{"train": ')
    rule = r"^\S+config\.json must be JSON, and it is damaged: Invalid JSON: [^\n]+\.$"
    with pytest.raises(ConfigError, match=rule):
        run.config()


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        ({"use": "cross_entropy"}, "sum"),
        ({"use": "ppo", "options": {}}, "sum"),
        ({"use": "cross_entropy", "options": {"reduction": "mean"}}, "mean"),
        ({"use": "dpo"}, "mean"),
    ],
)
def test_the_base_loss_of_an_old_run_keeps_its_meaning(
    run: RunFolder, loss: dict[str, Any], reduction: str
) -> None:
    file = run.path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "loss": loss}))
    assert run.config().loss.reduction == reduction


def test_a_file_is_no_folder_of_a_run(folder: Path) -> None:
    run = RunFolder(folder / "train.jsonl")
    with pytest.raises(RunError, match=r"train\.jsonl must be the folder of a run, with a config"):
        run.config()


def test_a_config_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(RunError, match=r"config\.json must be a file that can be read: Is a dir"):
        RunFolder(tmp_path).config()


def test_data_files_must_not_change_during_a_run(run: RunFolder, folder: Path) -> None:
    data = folder / "train.jsonl"
    data.write_text("abc")
    run.hold_data([str(data)])
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    assert json.loads((run.path / "data.json").read_text()) == {str(data): digest}
    run.hold_data([str(data)])
    data.write_text("abd")
    with pytest.raises(RunError, match=r"train\.jsonl must be as it was when the run began"):
        run.hold_data([str(data)])
    data.unlink()
    with pytest.raises(RunError, match=r"train\.jsonl must be a file that can be read"):
        run.hold_data([str(data)])


def test_samples_and_the_result_are_read_back(run: RunFolder) -> None:
    samples = [{"when": "before", "prompt": "é"}, {"when": "after", "prompt": "→"}]
    run.keep_samples(samples[:1])
    run.keep_samples(samples)
    assert run.samples() == samples
    assert run.result() is None
    run.finish({"status": "done"})
    assert run.result() == {"status": "done"}


@pytest.mark.parametrize("mark", ["\u0085", "\u2028", "\u2029", "\x0b", "\x1c"])
def test_a_sample_with_a_line_separator_is_read_back(run: RunFolder, mark: str) -> None:
    samples = [{"when": "before", "prompt": f"a{mark}b", "completion": mark}]
    run.keep_samples(samples)
    assert run.samples() == samples
    run.append({"step": 0, "skipped/a/reason": f"a{mark}b"})
    assert run.metrics() == [{"step": 0, "skipped/a/reason": f"a{mark}b"}]


def test_a_config_of_other_keys_is_an_error_that_shows_no_value(run: RunFolder) -> None:
    (run.path / "config.json").write_text('{"data": {"path": "x"}, "password": "shown-7301"}')
    with pytest.raises(ConfigError, match=r"config\.json: \[?password\]? is not a key") as caught:
        run.config()
    assert "shown-7301" not in str(caught.value)


def test_every_line_of_a_message_has_a_time(run: RunFolder) -> None:
    run.log("one\ntwo")
    lines = (run.path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in lines] == ["one", "two"]


DAMAGED = [b"{", b"[1]", b"3", b"[" * 100_000, b"\xff\xfe", b"\0"]


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "result.json", "data.json"])
def test_a_damaged_file_is_an_error_that_names_it(
    run: RunFolder, name: str, content: bytes
) -> None:
    readers: dict[str, Callable[[], object]] = {
        "metrics.jsonl": run.metrics,
        "samples.jsonl": run.samples,
        "result.json": run.result,
        "data.json": lambda: run.hold_data([]),
    }
    file = run.path / name
    file.write_bytes(content)
    with pytest.raises(RunError, match=rf"{name}.* must be (a )?JSON"):
        readers[name]()
    file.unlink()
    if name != "data.json":
        file.mkdir()
        with pytest.raises(RunError, match=rf"{name} must be a file that can be read"):
            readers[name]()


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', '{"step": 1, "requests": 2, "set": 3}'])
def test_a_damaged_record_of_a_change_is_named(run: RunFolder, line: str) -> None:
    whole = '{"step": 1, "requests": 20, "set": [{"l2.weight": 1}]}'
    (run.path / "changes.jsonl").write_text(f"{whole}\n{line}\n")
    with pytest.raises(RunError, match=r"changes\.jsonl, line 2, must "):
        run.changes()
    (run.path / "changes.jsonl").write_text(f"{whole}\n{line}")  # killed while it was written
    assert run.changes() == [json.loads(whole)]


def test_the_line_of_a_damaged_file_is_named(run: RunFolder) -> None:
    run.metrics_file.write_text('{"step": 0}\n\n{"step":\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 3, must be JSON, and it is damaged"):
        run.metrics()


def test_a_line_ends_with_a_newline_alone(run: RunFolder) -> None:
    samples = [{"completion": "a\u2028b\u2029c\x85d"}]
    run.keep_samples(samples)
    assert run.samples() == samples


def test_a_write_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="must be writable"):
        write_file(tmp_path / "file" / "a", b"x")


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "log.txt",
        "drivers.jsonl",
        ".lock",
        "checkpoints",
        "checkpoints/a",
        "checkpoints/a/weights",
        "tensorboard",
        "study.db",
        "output.txt",
    ],
)
def test_a_file_of_a_run_that_is_a_link_is_refused(
    run: RunFolder, tmp_path: Path, name: str
) -> None:
    """The run would write to it, cut it or delete in it, wherever it leads."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    link = run.path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    refused = pytest.raises(RunError, match=f"{name} must be a file or folder of the run itself")
    with refused, run.locked():
        pass
    assert outside.read_text() == "mine"


def test_a_run_folder_may_be_a_link(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run.path)
    with RunFolder(tmp_path / "link").locked():
        pass
