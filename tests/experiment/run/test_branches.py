"""Branches: a new run that goes on from a checkpoint of another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.errors import ConfigError, RunError
from steelyard.experiment import RunFolder, resume, train
from steelyard.experiment.run.branches import make_branch
from steelyard.experiment.run.changes import request_settings
from tests.experiment.small_runs import KL, L2, small_config

STEPS = 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branches")
    settings = (f"train.steps={STEPS}", "train.save_every=2", "train.keep=3")
    prompts = ('train.sample_prompts=["One"]', "train.sample_tokens=2")
    train(small_config(folder, *settings, *prompts, regularizers=[KL, L2]), folder / "first")
    return folder


@pytest.fixture
def first(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs", symlinks=True)) / "first"


def losses(run: Path) -> list[float]:
    return [row["loss_total"] for row in RunFolder(run).metrics()]


def files_of(run: Path) -> dict[str, bytes]:
    return {str(f.relative_to(run)): f.read_bytes() for f in run.rglob("*") if f.is_file()}


def test_a_branch_without_changes_repeats_the_run_bit_by_bit(first: Path) -> None:
    before = files_of(first)
    branch = make_branch(first, 2)
    assert branch.folder == first.with_name("first-at-2").resolve()
    assert len(losses(branch.folder)) == 2
    outcome = resume(branch.folder)
    assert (outcome.status, outcome.steps) == ("done", STEPS)
    assert losses(branch.folder) == losses(first)
    assert files_of(first) == before, "the other run is not changed"
    config = RunFolder(branch.folder).config().branch
    assert config is not None
    assert (config.run, config.step) == ("first", 2)
    whens = [sample["when"] for sample in RunFolder(branch.folder).samples()]
    assert whens == ["before", "after"]


def test_other_settings_hold_from_the_checkpoint_on(first: Path) -> None:
    branch = make_branch(first, 4, ["kl.weight=0.5", "train.steps=7"])
    resume(branch.folder)
    rows = RunFolder(branch.folder).metrics()
    assert [row["regularizers/kl/weight"] for row in rows] == [0.1] * 4 + [0.5] * 3
    assert losses(branch.folder)[:4] == losses(first)[:4]
    assert losses(branch.folder)[4] != losses(first)[4]
    (change,) = RunFolder(branch.folder).changes()
    assert (change["step"], change["set"]) == (4, [{"kl.weight": 0.5}])


def test_changes_of_the_other_run_before_the_checkpoint_hold_too(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, "train.steps=4", "train.save_every=2", "train.keep=2", regularizers=[KL]
    )
    asked: list[Any] = []

    def stop() -> bool:
        if not asked:
            asked.append(request_settings(tmp_path / "first", ["kl.weight=0.25"]))
        return False

    train(config, tmp_path / "first", stop=stop)
    weights = [row["regularizers/kl/weight"] for row in RunFolder(tmp_path / "first").metrics()]
    assert weights[-1] == 0.25
    branch = make_branch(tmp_path / "first", 2)
    resume(branch.folder)
    rows = RunFolder(branch.folder).metrics()
    assert [row["regularizers/kl/weight"] for row in rows] == weights
    assert losses(branch.folder) == losses(tmp_path / "first")


def test_branches_of_one_checkpoint_have_folders_of_their_own(first: Path) -> None:
    names = [make_branch(first, 2).folder.name for _ in range(3)]
    assert names == ["first-at-2", "first-at-2-2", "first-at-2-3"]
    named = make_branch(first, 2, folder=first.parent / "deep" / "other")
    config = json.loads((named.folder / "config.json").read_text())
    assert config["branch"] == {"run": "../first", "step": 2}


def test_a_branch_of_a_branch(first: Path) -> None:
    one = make_branch(first, 2)
    resume(one.folder)
    other = make_branch(one.folder, 4)
    resume(other.folder)
    assert losses(other.folder) == losses(first)


@pytest.mark.parametrize(
    ("step", "settings", "error", "message"),
    [
        (3, [], RunError, r"step must be that of a checkpoint of .*first, 2 or 4 or 6, got 3"),
        (2, ["kl.wieght=1"], ConfigError, r"a setting must be learning_rate, .* got 'kl.wieght'"),
        (2, ["kl.weight=-1"], ConfigError, "weight"),
        (2, ["model.rank=2"], ConfigError, "a setting must be learning_rate"),
        (2, ["train.steps=x"], ConfigError, "train.steps must be a whole number, got 'x'"),
        (2, ["steps"], ConfigError, "a setting must look like kl.weight=0.2"),
        (6, [], ConfigError, r"train.steps must be more than the 6 steps .* add train.steps=26"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    first: Path, step: int, settings: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_branch(first, step, settings)
    assert [path.name for path in first.parent.iterdir() if path.is_dir()] == ["first"]


def test_a_folder_with_a_run_is_refused(first: Path) -> None:
    with pytest.raises(RunError, match="first must be empty or new, and it holds a run"):
        make_branch(first, 2, folder=first)
    with pytest.raises(RunError, match="nowhere must be the folder of a run"):
        make_branch(first.with_name("nowhere"), 2)


def test_a_folder_that_cannot_be_written_is_an_error(first: Path) -> None:
    (first.parent / "file").touch()
    with pytest.raises(RunError, match=r"file/x must be a folder that can be written"):
        make_branch(first, 2, folder=first.parent / "file" / "x")


def test_secrets_of_the_config_are_passed_on(first: Path) -> None:
    config = json.loads((first / "config.json").read_text())
    config["regularizers"][0]["options"] = {"headers": {"Authorization": "***"}}
    (first / "config.json").write_text(json.dumps(config))
    key = "regularizers.kl.options.headers.Authorization"
    branch = make_branch(first, 2, [f"{key}=Bearer abc", "kl.weight=0.5"])
    assert branch.secrets == [f"{key}=Bearer abc"]
    assert "Bearer abc" not in "".join(map(str, files_of(branch.folder).values()))


def test_the_best_checkpoint_comes_along_if_it_is_not_later(tmp_path: Path) -> None:
    settings = ("train.steps=6", "train.save_every=2", "train.keep=3", "train.evaluate_every=2")
    best = 'train.keep_best={metric="held_out/loss"}'
    train(small_config(tmp_path, *settings, best, regularizers=[KL]), tmp_path / "first")
    record = json.loads((tmp_path / "first" / "checkpoints" / "best.json").read_text())
    for step in (4, 6):
        branch = make_branch(tmp_path / "first", step, ["train.steps=8"])
        assert (branch.folder / "checkpoints" / "best.json").is_file() == (record["step"] <= step)
        assert resume(branch.folder).status == "done"


def test_the_command_goes_on_from_the_newest_checkpoint(first: Path) -> None:
    result = CliRunner().invoke(app, ["branch", str(first), "--at", "4", "l2.enabled=false"])
    assert result.exit_code == 0, result.output
    assert "first-at-4 goes on from step 4 of" in result.output
    assert "Done: 6 steps in" in result.output
    rows = RunFolder(first.with_name("first-at-4")).metrics()
    assert ["regularizers/l2/value" in row for row in rows] == [True] * 4 + [False] * 2
    newest = CliRunner().invoke(app, ["branch", str(first), "train.steps=7"])
    assert newest.exit_code == 0, newest.output
    assert first.with_name("first-at-6").is_dir()
