"""A run on a node, here in this process: its working directory is the package."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.errors import ConfigError, RunError, TermError
from steelyard.experiment import Config, RunFolder, train
from steelyard.experiment.config_secrets import secret_sources
from steelyard.experiment.on_ray.folder_changes import FileChange, apply, whole
from steelyard.experiment.on_ray.node_run import Ended, Message, NodeRun, Reference, RunOrder
from steelyard.experiment.on_ray.package import pack
from tests.experiment.small_runs import L2, small_config, without_clock

TERMS = """
import pathlib

def secret(data, logprobs, token, key):
    assert (token, key) == ("env-7101", "file-7102"), (token, key)
    return sum(row.square().mean() for row in logprobs)

def broken(data, logprobs):
    raise OSError(f"nothing at {pathlib.Path(__file__).parent}")

def exits(data, logprobs):
    raise SystemExit(3)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the node has a copy of; the working directory is the node's."""
    project, node = tmp_path / "project", tmp_path / "node"
    project.mkdir()
    node.mkdir()
    (project / "node_terms.py").write_text(TERMS)
    monkeypatch.chdir(node)
    monkeypatch.delitem(sys.modules, "node_terms", raising=False)
    return project


def order(config: Config, run: Path) -> RunOrder:
    paths = pack(config, run, Path.cwd())
    files = [change for change in whole(run) if change.path != "config.json"]
    raw = config.model_dump(mode="json")
    return RunOrder(run.name, raw, paths, {}, {}, files, RunFolder(run).holds_run)


def messages(node: NodeRun) -> Iterable[Message]:
    while True:
        for message in node.messages():
            yield message
            if isinstance(message, Ended):
                return


def copy(node: NodeRun, run: Path) -> Ended:
    run.mkdir(exist_ok=True)
    for message in messages(node):
        match message:
            case Ended():
                return message
            case FileChange():
                apply(run, [message])
    raise AssertionError("it has not ended")


def test_the_copy_of_a_run_names_the_files_of_the_driver(project: Path, tmp_path: Path) -> None:
    config = small_config(project, "data.reference=always")
    train(config, tmp_path / "local")
    found = list(messages(NodeRun(order(config, tmp_path / "copy"), "node")))
    assert found[-1] == Ended("done")
    assert len([each for each in found if isinstance(each, Reference)]) == 1
    apply(tmp_path / "copy", (each for each in found if isinstance(each, FileChange)))
    for name in ("config.json", "data.json", "samples.jsonl"):
        mine, other = tmp_path / "copy" / name, tmp_path / "local" / name
        assert mine.exists() == other.exists()
        assert not mine.exists() or mine.read_bytes() == other.read_bytes()
    copied, local = (RunFolder(tmp_path / name).metrics() for name in ("copy", "local"))
    assert [without_clock(line) for line in copied] == [without_clock(line) for line in local]
    assert str(Path.cwd()) not in (tmp_path / "copy" / "log.txt").read_text()
    left = {path.name for path in Path.cwd().iterdir()}
    assert left == {"path", "reference.safetensors", ".reference.safetensors.lock"}


def test_after_each_message_the_copy_can_be_resumed(project: Path, tmp_path: Path) -> None:
    config = small_config(project)
    train(config, tmp_path / "local")
    expected = [without_clock(line) for line in RunFolder(tmp_path / "local").metrics()]
    copied = tmp_path / "copy"
    copied.mkdir()
    changes = [
        each
        for each in messages(NodeRun(order(config, copied), "node"))
        if isinstance(each, FileChange)
    ]
    records = [n for n, each in enumerate(changes) if each.path.startswith("checkpoints/step-")]
    for number in (records[0], records[0] + 3, records[-1]):
        shutil.rmtree(copied)
        copied.mkdir()
        apply(copied, changes[: number + 1])
        assert copy(NodeRun(order(config, copied), "node"), copied) == Ended("done")
        resumed = [without_clock(line) for line in RunFolder(copied).metrics()]
        assert resumed == expected, changes[number].path
        assert json.loads((copied / "data.json").read_text()).keys() == {
            str(project / "train.jsonl")
        }


def test_a_stop_saves_what_was_done(project: Path, tmp_path: Path) -> None:
    config = small_config(project, "train.save_every=0", "train.steps=500")
    node = NodeRun(order(config, tmp_path / "copy"), "node")
    (tmp_path / "copy").mkdir()
    for message in messages(node):
        if isinstance(message, FileChange):
            apply(tmp_path / "copy", [message])
            if message.path == "metrics.jsonl" and message.data:  # it is empty at first
                node.stop()
    assert message == Ended("interrupted")
    run = RunFolder(tmp_path / "copy")
    assert 0 < len(run.metrics()) < 500
    assert len(list(run.checkpoints.glob("step-*.json"))) == 1


def test_secrets_reach_the_node_and_no_file_of_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "key.txt").write_text("file-7102")
    options = {"token": {"env": "NODE_TOKEN"}, "key": {"file": "key.txt"}}
    entry = {**L2, "use": "node_terms:secret", "options": options}
    config = small_config(project, regularizers=[entry])
    variables, files = secret_sources(config.model_dump(mode="json"))
    assert (variables, files) == (["NODE_TOKEN"], [str(project / "key.txt")])
    monkeypatch.setenv("NODE_TOKEN", "")  # restores it afterwards
    ordered = replace(
        order(config, tmp_path / "copy"),
        environment={"NODE_TOKEN": "env-7101"},
        secret_files={files[0]: "file-7102"},
    )
    assert copy(NodeRun(ordered, "node"), tmp_path / "copy") == Ended("done")
    assert not list(Path.cwd().rglob(".secrets"))
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["regularizers"][0][
        "options"
    ] == {"token": {"env": "NODE_TOKEN"}, "key": {"file": files[0]}}


def test_an_error_keeps_its_type_and_names_the_node(project: Path, tmp_path: Path) -> None:
    config = small_config(project, regularizers=[{**L2, "use": "node_terms:broken"}])
    error = copy(NodeRun(order(config, tmp_path / "copy"), "10.0.0.7"), tmp_path / "copy").error
    assert isinstance(error, TermError)
    assert f"nothing at {project}" in str(error)
    assert error.__notes__[-1] == "(on the node 10.0.0.7)"
    assert f"nothing at {project}" in (tmp_path / "copy" / "log.txt").read_text()


def test_an_error_of_another_kind_is_described(project: Path, tmp_path: Path) -> None:
    config = small_config(project, regularizers=[{**L2, "use": "node_terms:exits"}])
    ended = copy(NodeRun(order(config, tmp_path / "copy"), "10.0.0.7"), tmp_path / "copy")
    assert isinstance(ended.error, RunError | TermError)


def test_a_module_that_the_node_lacks_is_named(project: Path, tmp_path: Path) -> None:
    config = small_config(project, "imports=['only_here_9']")
    error = copy(NodeRun(order(config, tmp_path / "copy"), "10.0.0.7"), tmp_path / "copy").error
    assert isinstance(error, ConfigError)
    assert "imports must be modules, and 'only_here_9' is none" in str(error)
