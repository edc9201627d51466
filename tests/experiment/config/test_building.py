"""Imports of a config, and errors with their place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from steelyard.errors import ConfigError, RegistryError, SpecError
from steelyard.experiment import read_config
from steelyard.experiment.config.reading import import_modules, locate_errors


def test_modules_are_imported_from_the_folder_of_the_config(folder: Path) -> None:
    (folder / "module_of_a_config.py").write_text("VALUE = 3\n")
    raw = {"data": {"path": "train.jsonl"}, "imports": ["module_of_a_config"]}
    import_modules(read_config(raw, folder=folder))
    assert sys.modules["module_of_a_config"].VALUE == 3
    sys.path.remove(str(folder))


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(folder: Path, code: str, why: str) -> None:
    (folder / "failing_import.py").write_text(code)
    raw = {"data": {"path": "train.jsonl"}, "imports": ["failing_import"]}
    with pytest.raises(ConfigError) as caught:
        import_modules(read_config(raw, folder=folder))
    place = f"{folder.resolve() / 'failing_import.py'}, line 1"
    assert str(caught.value) == f"imports: 'failing_import' cannot be imported: {why} ({place})."
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
    with pytest.raises(ConfigError) as caught, locate_errors("[[rewards]] #2"):
        raise error
    assert str(caught.value) == message
