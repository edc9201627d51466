"""Messages of validation errors: location, key, rule, value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from steelyard.errors import ConfigError
from steelyard.experiment import Config, read_config
from steelyard.experiment.config.reading import format_errors, format_location


def test_every_error_is_reported(folder: Path) -> None:
    raw = {"data": {"path": "train.jsonl"}, "train": {"steps": 0, "seed": -1}, "loss": {"usee": 1}}
    with pytest.raises(ConfigError) as caught:
        read_config(raw, folder=folder)
    assert str(caught.value).splitlines() == [
        "[train]: steps must be >= 1, got 0",
        "[train]: seed must be >= 0, got -1",
        "[loss]: usee is not a key; did you mean use? Known: use, reduction, options, aggregate",
    ]


@pytest.mark.parametrize(
    ("loc", "said"),
    [
        (("train", "steps"), "[train]: steps"),
        (("regularizers", 1, "weight"), "[[regularizers]] #2: weight"),
        (("regularizers", 0), "[[regularizers]] #1"),
        (("sinks", "wandb", "mode"), "[sinks]: wandb.mode"),
        (("data",), "[data]"),
        (("imports",), "imports"),
        ((), "the config"),
    ],
)
def test_a_location_is_written_as_in_the_file(loc: tuple[str | int, ...], said: str) -> None:
    assert format_location(loc) == said


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "[data] must be given, got nothing"),
        ({"train": 3}, "[train] must be a table, got 3"),
        ({"train": {"timeout": 301}}, "[train]: timeout must be <= 300, got 301"),
        ({"train": {"timeout": 0}}, "[train]: timeout must be > 0, got 0"),
        ({"train": {"steps": 1.5}}, "[train]: steps must be a whole number, got 1.5"),
        ({"train": {"track_grad_norms": 1}}, "[train]: track_grad_norms must be true or false"),
        ({"model": {"backend": "gpu"}}, "[model]: backend must be one of 'local' or 'tinker', got"),
        ({"data": {"path": ""}}, "[data]: path must be a non-empty string, got ''"),
        ({"imports": "a"}, "imports must be a list, got 'a'"),
        ({"regularizers": [{"weight": 1}]}, "[[regularizers]] #1: use must be given, got nothing"),
        (
            {"sinks": {"wandb": {"mod": 1}}},
            "[sinks]: wandb.mod is not a key; did you mean mode? Known: project, mode",
        ),
    ],
)
def test_each_kind_of_error_states_its_rule(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(raw)
    assert [line for line in format_errors(caught.value).splitlines() if line.startswith(message)]


def test_long_values_are_shortened_and_those_of_unknown_keys_not_shown() -> None:
    raw = {"data": {"path": "x"}, "train": {"steps": "9" * 200}, "api_key": "tml-secret"}
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(raw)
    steps, key = format_errors(caught.value).splitlines()
    assert steps == f"[train]: steps must be a whole number, got '{'9' * 79}…"
    assert key.startswith("[api_key] is not a key; known: imports, python_path, model, ")
    assert "secret" not in key
