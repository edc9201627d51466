"""The commands `steelyard config schema`, `example` and `check`, run for real."""

from __future__ import annotations

import json
from pathlib import Path

from .command import CommandRunner


def test_the_schema_and_an_example_are_printed_and_checked(
    command: CommandRunner, project: Path
) -> None:
    schema = json.loads(command.run("config", "schema", cwd=project).out)
    assert set(schema["properties"]) >= {"model", "data", "train", "loss", "regularizers"}
    example = command.run("config", "example", cwd=project).out
    (project / "example.toml").write_text(example)
    done = command.run("config", "check", "example.toml", cwd=project)
    assert (done.code, done.out) == (
        0,
        "example.toml: valid. Loss: cross_entropy. Regularizers: kl, entropy.\n",
    )
    ranges = "regularizers.kl.weight={tune = [0.1, 1.0]}"
    assert command.run("config", "check", "example.toml", ranges, cwd=project).code == 0


def test_an_example_of_on_policy_training_is_printed_and_checked(
    command: CommandRunner, project: Path
) -> None:
    example = command.run("config", "example", "--on-policy", cwd=project).out
    (project / "example.toml").write_text(example)
    (project / "prompts.jsonl").touch()
    done = command.run("config", "check", "example.toml", cwd=project)
    assert (done.code, done.out) == (
        0,
        "example.toml: valid. Loss: importance_sampling. Regularizers: kl. Rewards: short.\n",
    )
