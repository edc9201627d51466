"""Optional dependencies: the table of extras, and the errors when one is missing."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import pytest

from steelyard._extras import EXTRAS, cure, require
from steelyard.errors import MissingExtraError


def test_every_cure_names_an_extra_that_exists() -> None:
    extras = importlib.metadata.metadata("steelyard").get_all("Provides-Extra") or []
    assert set(EXTRAS.values()) <= set(extras)


def test_the_error_has_the_pip_command_of_the_modules_extra() -> None:
    error = cure("a search", ModuleNotFoundError(name="optuna"))
    assert isinstance(error, MissingExtraError)
    assert str(error) == (
        'a search needs optuna, which is not installed: pip install "steelyard[tune]".'
    )


def test_a_missing_submodule_counts_as_its_package() -> None:
    error = cure("serving", ModuleNotFoundError(name="uvicorn.config"))
    assert "needs uvicorn, " in str(error)
    assert "steelyard[serve]" in str(error)


def test_an_extra_can_be_chosen_instead_of_the_modules_own() -> None:
    error = cure("the trainer", ModuleNotFoundError(name="transformers"), extra="hf")
    assert str(error).endswith('pip install "steelyard[hf]".')


@pytest.mark.parametrize("name", ["pebble", "", None])
def test_a_module_of_no_extra_keeps_its_own_error(name: str | None) -> None:
    error = ModuleNotFoundError(name=name)
    assert cure("steelyard.Pipeline", error) is error


def test_require_accepts_an_installed_module_without_importing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "z3", raising=False)
    require("z3", "regularizer 'logic'")
    assert "z3" not in sys.modules


@pytest.mark.parametrize("loaded", [None, ModuleType("z3")], ids=["blocked", "without a spec"])
def test_require_raises_for_a_missing_module(
    loaded: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "z3", loaded)  # None blocks the import
    with pytest.raises(MissingExtraError) as caught:
        require("z3", "regularizer 'logic'")
    assert str(caught.value) == (
        "regularizer 'logic' needs z3, which is not installed: pip install \"steelyard[logic]\"."
    )
