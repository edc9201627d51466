"""What `chat` and `sample` say about the run that they use."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from steelyard.cli.trained_run import describe_checkpoint, printable

from .command import CommandRunner


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert printable("a\tb\nc é 日") == "a\tb\nc é 日"
    assert printable("\x1b[2J\x07\x9b\r") == "\ufffd[2J\ufffd\ufffd\ufffd"


def test_a_run_that_is_not_finished_is_named_so() -> None:
    assert describe_checkpoint(3, 3, is_finished=True) == "trained for 3 of 3 steps"
    assert describe_checkpoint(2, 3, is_finished=False) == (
        "trained for 2 of 3 steps: the run is not finished, this is a checkpoint of it"
    )


@pytest.mark.parametrize("name", ["chat", "sample"])
def test_a_run_that_cannot_be_used_is_an_error(
    command: CommandRunner, trained_run: Path, tmp_path: Path, name: str
) -> None:
    prompt = ("--prompt", "x") if name == "sample" else ()
    for run, error in (
        ("nowhere", "RunError: nowhere must be the folder of a run"),
        ("fresh", "RunError: fresh must hold a checkpoint, and it has none yet"),
        ("moved", "RunError: moved was trained on the model '/gone', and it is not there"),
    ):
        if run == "fresh":
            (tmp_path / run).mkdir()
            shutil.copy(trained_run / "config.json", tmp_path / run)
        elif run == "moved":
            shutil.copytree(trained_run, tmp_path / run, symlinks=True)
            config = json.loads((trained_run / "config.json").read_text())
            config["model"]["base_model"] = "/gone"
            (tmp_path / run / "config.json").write_text(json.dumps(config))
        done = command.run(name, run, *prompt, cwd=tmp_path)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(error)
        assert done.err.count("\n") == 1


@pytest.mark.parametrize("name", ["resume", "chat", "sample"])
def test_the_address_in_a_run_folder_must_be_named(
    command: CommandRunner, trained_run: Path, tmp_path: Path, name: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = json.loads((trained_run / "config.json").read_text())
    address = "http://127.0.0.1:9"
    config["model"] |= {"backend": "tinker", "base_url": address}
    (run / "config.json").write_text(json.dumps(config))
    prompt = ("--prompt", "x") if name == "sample" else ()
    env = {"XDG_CONFIG_HOME": str(tmp_path), "TINKER_API_KEY": "tml-real"}
    done = command.run(name, "run", *prompt, cwd=tmp_path, env=env)
    assert (done.code, done.out) == (1, "")
    assert f"you trust it, give --base-url {address} once." in done.err
    named = command.run(name, "run", "--base-url", address, *prompt, cwd=tmp_path, env=env)
    assert f"a Tinker service must answer at {address}, and none does" in named.err
    again = command.run(name, "run", *prompt, cwd=tmp_path, env=env)
    assert again.err == named.err
