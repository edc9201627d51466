"""Runs on a real Ray cluster of two nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steelyard import __version__
from steelyard.cli.exit_codes import INTERRUPTED
from steelyard.errors import ConfigError, RunError
from steelyard.experiment import RayCluster, RunFolder, ablate, tune
from steelyard.experiment.compare.ray_runs import _actor_class, open_runs
from steelyard.experiment.data.base_model_outputs import share_reference_logprobs
from tests import ray_cluster as clusters
from tests.cli.command import wait_for
from tests.cli.project import state_of
from tests.experiment.small_runs import L2, Recorder, small_config, without_clock

TERMS = """
import pathlib, time
import torch

def noise(data, logprobs):
    return torch.rand(()) * torch.cat(logprobs).square().mean()

def gated(data, logprobs, gate):
    calls.append(0)
    while len(calls) > 2 and not pathlib.Path(gate).exists():
        time.sleep(0.05)
    return torch.cat(logprobs).square().mean()

calls = []
"""
NOISE = {**L2, "use": "ray_terms:noise", "name": "noise"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "ray_terms.py").write_text(TERMS)
    return project


def metrics(run: Path) -> list[dict[str, Any]]:
    return [without_clock(line) for line in RunFolder(run).metrics()]


def test_an_ablation_on_ray_is_that_of_this_machine(
    ray_cluster: clusters.RayCluster, project: Path
) -> None:
    config = small_config(project, "data.reference=always", regularizers=[NOISE])
    recorder = Recorder()
    there = ablate(config, project / "there", watch=recorder, ray=RayCluster(ray_cluster.address))
    here = ablate(config, project / "here")
    assert there.done
    assert recorder.counts == [(step, 6) for step in range(6)]
    assert sorted(recorder.messages) == ["run 1 of 2: all", "run 2 of 2: none"]
    assert there.runs == here.runs == {"all": "all", "none": "none"}
    for name in there.runs.values():
        mine, other = project / "there" / name, project / "here" / name
        assert metrics(mine) == metrics(other)
        for file in ("config.json", "data.json"):
            assert (mine / file).read_bytes() == (other / file).read_bytes()
        states = state_of(mine), state_of(other)
        assert all(bool((states[0][key] == states[1][key]).all()) for key in states[1])
        assert (mine / "adapter" / "checkpoint.json").is_file()
    assert (project / "there" / "reference.safetensors").read_bytes() == (
        project / "here" / "reference.safetensors"
    ).read_bytes()


def test_a_search_runs_its_trials_at_once_through_the_client(
    ray_cluster: clusters.RayCluster, project: Path
) -> None:
    span = {"tune": [0.1, 10.0], "log": True}
    config = small_config(
        project, "tune.trials=2", "train.steps=2", regularizers=[{**NOISE, "weight": span}]
    )
    cluster = RayCluster(ray_cluster.client_address)
    tuned = tune(config, project / "there", jobs=2, ray=cluster)
    assert tuned.done
    assert [trial.state for trial in tuned.search.trials] == ["completed"] * 2
    assert all(trial.held_out["held_out/loss"] > 0 for trial in tuned.search.trials)
    again = tune(config, project / "there", ray=RayCluster("127.0.0.1:1"))
    assert again.weights == tuned.weights, "and needs no cluster any more"


CPUS = {"node": 3, "raylet": 4}  # by what dies: Ray notices it seconds later


@pytest.fixture
def node(
    ray_cluster: clusters.RayCluster, request: pytest.FixtureRequest
) -> Iterator[list[object]]:
    """Nodes with more CPUs than the others have, and than those of the test before had."""
    nodes = [ray_cluster.add_node(num_cpus=CPUS[request.node.callspec.params["dies"]])]
    yield nodes
    for each in nodes:
        ray_cluster.kill_node(each)


@pytest.mark.parametrize("dies", ["node", "raylet"])
def test_a_run_whose_node_dies_goes_on_from_its_checkpoint_on_another(
    ray_cluster: clusters.RayCluster, node: list[object], project: Path, tmp_path: Path, dies: str
) -> None:
    gate = tmp_path / "gate"
    entry = {**L2, "use": "ray_terms:gated", "options": {"gate": str(gate)}}
    config = small_config(project, "train.steps=5", regularizers=[entry])
    share_reference_logprobs(project)

    class Killer(Recorder):
        def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
            super().step(step, steps, metrics)
            if not gate.exists():
                if dies == "raylet":  # the process of the run, in a term, outlives it
                    ray_cluster.kill_raylet(node[-1])
                else:
                    ray_cluster.kill_node(node.pop())
                node.append(ray_cluster.add_node(num_cpus=CPUS[dies]))
                gate.touch()

    killer = Killer()
    with open_runs(RayCluster(ray_cluster.address, cpus=CPUS[dies]), config, project) as runs:
        assert runs.at_once == 1
        outcome = runs.train(config, project / "there", lambda: killer, lambda: False)
    assert (outcome.status, outcome.steps) == ("done", 5)
    (said,) = killer.messages
    assert "there: its node or process died (" in said
    assert said.endswith("it goes on from its last checkpoint, retry 1 of 3")
    ablate(config, project / "here")
    assert metrics(project / "there") == metrics(project / "here" / "all")


def test_ctrl_c_ends_all_runs_and_keeps_what_they_did(
    ray_cluster: clusters.RayCluster, project: Path
) -> None:
    config = small_config(project, "train.steps=3000", "train.save_every=0", regularizers=[NOISE])
    (project / "c.json").write_text(config.model_dump_json())
    command = ["ablate", "c.json", "--run", "r", "--jobs", "1", "--ray", ray_cluster.address]
    started = subprocess.Popen(
        [sys.executable, "-m", "steelyard", *command], cwd=project, stdout=subprocess.PIPE
    )
    wait_for(project / "r" / "all" / "metrics.jsonl", lines=1)
    started.send_signal(signal.SIGINT)
    out, _ = started.communicate(timeout=600)
    assert started.returncode == INTERRUPTED
    assert b"Stopped and saved. Run the same command again to continue: r" in out
    run = RunFolder(project / "r" / "all")
    assert 0 < len(run.metrics()) < 3000
    assert len(list(run.checkpoints.glob("step-*.json"))) == 1, "it was saved"
    assert not (project / "r" / "none").exists(), "it had not begun"


def test_a_failing_run_is_raised_as_here_and_named_by_its_node(
    ray_cluster: clusters.RayCluster,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "only_here.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    config = small_config(project, "imports=['only_here']")
    with pytest.raises(ConfigError, match="and 'only_here' is none") as raised:
        ablate(config, project / "r", jobs=1, ray=RayCluster(ray_cluster.address))
    assert "(on the node " in raised.value.__notes__[-1]


def test_resources_that_no_node_has_are_refused_before_waiting(
    ray_cluster: clusters.RayCluster, project: Path
) -> None:
    cluster = RayCluster(ray_cluster.address, cpus=64)
    with pytest.raises(RunError, match=r"all that a run asks for, CPU 64, and the nodes have CPU"):
        ablate(small_config(project), project / "r", ray=cluster)


def test_a_second_connection_is_refused(ray_driver: clusters.RayCluster, project: Path) -> None:
    with pytest.raises(RunError, match=r"connected already: call ray\.shutdown\(\) first"):
        ablate(small_config(project), project / "r", ray=RayCluster(ray_driver.address))


def test_a_node_with_another_version_names_both() -> None:
    problem = _actor_class()().begin("9.9.9", b"")
    assert problem.startswith("every node must have steelyard 9.9.9 installed, as here, and ")
    assert problem.endswith(f" has {__version__}: install it there.")
