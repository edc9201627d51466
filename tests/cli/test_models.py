"""The commands `steelyard models list` and `pull`, run for real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from steelyard.cli.app import app
from steelyard.engine import model_listing
from steelyard.engine.model_listing import ListedModel, ModelSize

from .command import CommandRunner


def test_models_are_listed_and_pulled(command: CommandRunner, project: Path) -> None:
    env = {"STEELYARD_CACHE": str(project / "cache")}
    listed = command.run("models", "list", cwd=project, env=env)
    heading, smollm2, random, *_, memory, last = listed.out.splitlines()
    assert heading.split() == ["name", "context", "parameters", "weights", "training", "place"]
    assert re.search(r"smollm2-135m +8192 +135 M +0\.5 GB +4\.7 GB +not downloaded yet", smollm2)
    assert re.search(r"tiny-random +512 +0\.14 M +0\.0 GB +0\.6 GB +built in", random)
    assert "training with LoRA on 1024 tokens at a time" in memory
    assert last == "A folder saved by transformers or a Hub id works too."
    pulled = command.run("models", "pull", "tiny-random", cwd=project, env=env)
    assert pulled.code == 0
    assert "tiny-random is available: " in pulled.out
    unknown = command.run("models", "pull", "gpt-9", cwd=project, env=env)
    assert unknown.code == 1
    assert "base_model must be a known name" in unknown.err


def test_sizes_are_shown_as_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    size = ModelSize(1_234_000_000, None, None, None, None, None)
    unknown = ModelSize(None, 2048, None, None, None, None)
    models = [ListedModel("large", size, "here"), ListedModel("mine", unknown, "there")]
    monkeypatch.setattr(model_listing, "list_models", lambda: models)
    lines = CliRunner().invoke(app, ["models", "list"]).output.splitlines()
    assert lines[1].split() == ["large", "?", "1.2", "B", "4.9", "GB", "?", "here"]
    assert lines[2].split() == ["mine", "2048", "?", "?", "?", "there"]
