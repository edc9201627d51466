"""What travels to the nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.experiment import read_config
from steelyard.experiment.on_ray import package
from steelyard.experiment.on_ray.package import PathMap, pack
from tests.experiment.small_runs import small_config, write_data


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_folder_of_the_config_travels_without_results_and_environments(tmp_path: Path) -> None:
    project, target = tmp_path / "project", tmp_path / "target"
    project.mkdir()
    config = small_config(project)
    for name in (
        "own_terms.py", "words/list.txt", "runs/a/metrics.jsonl", ".venv/lib.py", ".env",
        ".git/HEAD", "__pycache__/own_terms.pyc", "first/ablation.json", "first/all/result.json",
        "search/study.db", "results/all/model.safetensors",
    ):  # fmt: skip
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    paths = pack(config, project / "results", target)
    assert paths == {str(project): "path/0"}
    assert files(target) == {
        "path/0/train.jsonl",
        "path/0/own_terms.py",
        "path/0/words/list.txt",
    }


def test_data_and_modules_of_other_folders_travel_once(tmp_path: Path) -> None:
    for name in ("project/inner", "shared", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    project = tmp_path / "project"
    held_out = write_data(tmp_path / "elsewhere/held.jsonl", [{"prompt": "a", "completion": "b"}])
    (tmp_path / "shared/terms.py").write_text("")
    write_data(project / "train.jsonl", [])
    raw = {
        "python_path": ["../shared", "inner"],
        "data": {"path": "train.jsonl", "held_out": str(held_out)},
    }
    config = read_config(raw, folder=project)
    (project / "inner/more.py").write_text("")
    paths = pack(config, tmp_path / "runs", tmp_path / "target")
    assert files(tmp_path / "target") == {
        "path/0/terms.py", "path/1/train.jsonl", "path/1/inner/more.py", "data/1/held.jsonl",
    }  # fmt: skip
    there = PathMap({here: f"/node/{name}" for here, name in paths.items()})
    raw = config.model_dump(mode="json")
    moved = there.config(raw)
    assert moved["data"]["path"] == "/node/path/1/train.jsonl"
    assert moved["data"]["held_out"] == "/node/data/1/held.jsonl"
    assert moved["python_path"] == ["/node/path/0", "/node/path/1/inner", "/node/path/1"]
    assert json.loads(there.to_driver(json.dumps(moved))) == raw


def test_paths_are_replaced_as_they_are_written() -> None:
    paths = PathMap({"/home/jörg": "/node/path/0", "/home": "/node/path/1"})
    assert paths.to_node("/home/jörg/x") == "/node/path/0/x"
    assert paths.to_node("/homely") == "/homely"
    written = json.dumps({"/node/path/0/x": "/node/path/1"})
    back = paths.to_driver(written, lambda path: json.dumps(path)[1:-1])
    assert back == json.dumps({"/home/jörg/x": "/home"})


def test_too_much_is_refused_with_the_largest_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_LIMIT", 2 * 2**20)
    config = small_config(tmp_path)
    (tmp_path / "video").write_bytes(bytes(3 * 2**20))
    with pytest.raises(
        RunError,
        match=r"must have at most 2 MiB, and \S+ has more; the largest files are "
        r"\S+video \(3 MiB\).*Move the config, its modules and its data to a folder",
    ):
        pack(config, tmp_path / "runs", tmp_path / "runs" / "target")
