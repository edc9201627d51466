"""Imports of a config, and errors with their place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from steelyard.errors import ConfigError, RegistryError, SpecError
from steelyard.experiment import read_config
from steelyard.experiment.build_parts import import_modules, locate_errors


def test_modules_are_imported_from_the_folder_of_the_config(folder: Path) -> None:
    (folder / "module_of_a_config.py").write_text("VALUE = 3\n")
    raw = {"data": {"path": "train.jsonl"}, "imports": ["module_of_a_config"]}
    import_modules(read_config(raw, folder=folder))
    assert sys.modules["module_of_a_config"].VALUE == 3
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RegistryError("no such name."), "[[rewards]] #2: use: no such name."),
        (SpecError("weight must be >= 0."), "[[rewards]] #2: weight must be >= 0."),
        (ConfigError("no secret"), "[[rewards]] #2: no secret"),
    ],
)
def test_errors_get_the_place_in_the_config(error: Exception, message: str) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(ConfigError) as caught:
        locate_errors("[[rewards]] #2", fail)
    assert str(caught.value) == message
