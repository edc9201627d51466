"""A run on a node, here in this process."""

from __future__ import annotations

import json
import pickle
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError, RunError, TermError
from steelyard.experiment import Config, RunFolder, train
from steelyard.experiment.compare.ray_runs import NodeRun, RunOrder
from steelyard.experiment.config.secrets import secret_sources
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
    project = tmp_path / "project"
    project.mkdir()
    (project / "node_terms.py").write_text(TERMS)
    (tmp_path / "token").write_text("7100")
    monkeypatch.delitem(sys.modules, "node_terms", raising=False)
    return project


def order(config: Config, folder: Path) -> RunOrder:
    return RunOrder(folder / "there", config, {}, folder / "token", "7100")


def train_there(ordered: RunOrder, patience: float = 0.0) -> tuple[str, Any]:
    node = NodeRun(pickle.loads(pickle.dumps(ordered)), "10.0.0.7")
    assert node.problem is None
    status, error = pickle.loads(node.train(patience))
    return status, error


def test_a_run_on_a_node_is_that_of_this_machine(project: Path, tmp_path: Path) -> None:
    config = small_config(project)
    train(config, tmp_path / "here")
    assert train_there(order(config, tmp_path)) == ("done", None)
    for name in ("config.json", "data.json"):
        mine, other = tmp_path / "there" / name, tmp_path / "here" / name
        assert mine.read_bytes() == other.read_bytes()
    there, here = (RunFolder(tmp_path / name).metrics() for name in ("there", "here"))
    assert [without_clock(line) for line in there] == [without_clock(line) for line in here]
    assert train_there(order(config, tmp_path)) == ("done", None), "it is finished"


def test_a_stop_saves_what_was_done(project: Path, tmp_path: Path) -> None:
    config = small_config(project, "train.save_every=0", "train.steps=500")
    node = NodeRun(order(config, tmp_path), "node")
    run = RunFolder(tmp_path / "there")

    def stop_after_a_step() -> None:
        while not (run.metrics_file.exists() and run.metrics()):
            pass
        node.stop()

    threading.Thread(target=stop_after_a_step, daemon=True).start()
    assert pickle.loads(node.train(0.0)) == ("interrupted", None)
    assert 0 < len(run.metrics()) < 500
    assert len(list(run.checkpoints.glob("step-*.json"))) == 1


def test_a_retry_waits_for_the_process_of_a_dead_node(project: Path, tmp_path: Path) -> None:
    config = small_config(project)
    with RunFolder(tmp_path / "there").locked():
        _, error = train_there(order(config, tmp_path), patience=0.01)
        assert "must be used by one process at a time" in str(error)
        waiting = NodeRun(order(config, tmp_path), "node")
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(waiting.train(600.0)))
        thread.start()
    thread.join()
    assert pickle.loads(results[0]) == ("done", None)


def test_secrets_of_the_environment_reach_the_node_and_no_file(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "key.txt").write_text("file-7102")
    options = {"token": {"env": "NODE_TOKEN"}, "key": {"file": "key.txt"}}
    entry = {**L2, "use": "node_terms:secret", "options": options}
    config = small_config(project, regularizers=[entry])
    variables, files = secret_sources(config.model_dump(mode="json"))
    assert (variables, files) == (["NODE_TOKEN"], [str(project / "key.txt")])
    monkeypatch.setenv("NODE_TOKEN", "")  # restores it afterwards
    ordered = replace(order(config, tmp_path), environment={"NODE_TOKEN": "env-7101"})
    assert train_there(ordered) == ("done", None)
    for file in (tmp_path / "there").rglob("*"):
        assert not file.is_file() or b"env-7101" not in file.read_bytes()
    assert json.loads((tmp_path / "there" / "config.json").read_text())["regularizers"][0][
        "options"
    ] == {"token": {"env": "NODE_TOKEN"}, "key": {"file": files[0]}}


def test_a_node_that_does_not_see_the_folder_of_the_runs_says_so(
    project: Path, tmp_path: Path
) -> None:
    ordered = order(small_config(project), tmp_path)
    elsewhere = replace(ordered, token_file=tmp_path / "missing" / "token")
    assert NodeRun(elsewhere, "10.0.0.7").problem == (
        f"every node must see the folder of the runs, {tmp_path / 'missing'}, and the node "
        f"10.0.0.7 does not (No such file or directory): put it on a disk that all nodes share, "
        f"under the same path."
    )
    another = NodeRun(replace(ordered, token="7999"), "10.0.0.7").problem
    assert another is not None
    assert f"the same folder of the runs, {tmp_path}, and the node 10.0.0.7 has another" in another


@pytest.mark.parametrize("name", ["train.jsonl", "held_out.jsonl", "key.txt"])
def test_a_file_that_the_node_does_not_see_is_named(
    project: Path, tmp_path: Path, name: str
) -> None:
    for other in ("held_out.jsonl", "key.txt"):
        (project / other).write_text('{"prompt": "a", "completion": "b"}\n')
    entry = {**L2, "use": "node_terms:secret", "options": {"key": {"file": "key.txt"}}}
    config = small_config(project, "data.held_out='held_out.jsonl'", regularizers=[entry])
    (project / name).unlink()
    problem = NodeRun(order(config, tmp_path), "10.0.0.7").problem
    assert problem == (
        f"every node must see the modules and files of the config, and the node 10.0.0.7 does not "
        f"see {project / name}: put it on a disk that all nodes share, under the same path."
    )


def test_an_error_keeps_its_type_and_names_the_node(project: Path, tmp_path: Path) -> None:
    config = small_config(project, regularizers=[{**L2, "use": "node_terms:broken"}])
    status, error = train_there(order(config, tmp_path))
    assert status == "interrupted"
    assert isinstance(error, TermError)
    assert f"nothing at {project}" in str(error)
    assert error.__notes__[-1] == "(on the node 10.0.0.7)"
    assert f"nothing at {project}" in (tmp_path / "there" / "log.txt").read_text()


def test_an_error_of_another_kind_is_described(project: Path, tmp_path: Path) -> None:
    config = small_config(project, regularizers=[{**L2, "use": "node_terms:exits"}])
    _, error = train_there(order(config, tmp_path))
    assert isinstance(error, RunError | TermError)


def test_a_module_that_the_node_lacks_is_named(project: Path, tmp_path: Path) -> None:
    config = small_config(project, "imports=['only_here_9']")
    _, error = train_there(order(config, tmp_path))
    assert isinstance(error, ConfigError)
    assert "imports must be modules, and 'only_here_9' is none" in str(error)
