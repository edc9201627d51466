"""The commands `steelyard models list` and `pull`, run for real."""

from __future__ import annotations

import re
from pathlib import Path

from .command import CommandRunner


def test_models_are_listed_and_pulled(command: CommandRunner, project: Path) -> None:
    env = {"STEELYARD_CACHE": str(project / "cache")}
    listed = command.run("models", "list", cwd=project, env=env)
    assert re.search(r"smollm2-135m +context +8192 +not downloaded yet", listed.out)
    assert re.search(r"tiny-random +context +512 +built in", listed.out)
    pulled = command.run("models", "pull", "tiny-random", cwd=project, env=env)
    assert pulled.code == 0
    assert "tiny-random is available: " in pulled.out
    unknown = command.run("models", "pull", "gpt-9", cwd=project, env=env)
    assert unknown.code == 1
    assert "base_model must be a known name" in unknown.err
