"""Deprecated aliases: they warn once, at the caller's line, and give the replacement."""

from __future__ import annotations

import sys
import warnings
from fractions import Fraction
from types import ModuleType

import pytest

import steelyard.gradients
from steelyard._renamed import leave_aliases


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `moved` with two aliases: of a class, and of a method of a class."""
    made = ModuleType("moved")
    monkeypatch.setitem(sys.modules, "moved", made)
    leave_aliases(
        "moved",
        {"Ratio": "fractions:Fraction", "parse": "fractions:Fraction.from_float"},
    )
    return made


def warned_by(statement: str) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(statement, {})
    return [each for each in caught if each.category is DeprecationWarning]


def test_an_old_name_gives_its_replacement_and_warns_with_the_new_name(module: ModuleType) -> None:
    message = r"^moved\.Ratio is deprecated: use fractions\.Fraction\.$"
    with pytest.warns(DeprecationWarning, match=message) as caught:
        found = module.Ratio
    assert found is Fraction
    assert len(caught) == 1


def test_a_replacement_may_be_an_attribute_of_a_class(module: ModuleType) -> None:
    with pytest.warns(DeprecationWarning, match=r"use fractions\.Fraction\.from_float\.$"):
        parse = module.parse
    assert parse(0.25) == Fraction(1, 4)


def test_each_name_warns_once(module: ModuleType) -> None:
    assert len(warned_by("from moved import Ratio")) == 1
    assert warned_by("from moved import Ratio") == []
    assert len(warned_by("from moved import parse")) == 1
    assert vars(module)["Ratio"] is Fraction


def test_a_replacement_is_imported_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moved", ModuleType("moved"))
    monkeypatch.delitem(sys.modules, "this", raising=False)
    leave_aliases("moved", {"Zen": "this:s"})
    assert "this" not in sys.modules


def test_an_unknown_name_is_an_attribute_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"^module 'moved' has no attribute 'Ratoi'$"):
        _ = module.Ratoi
    with pytest.raises(ImportError, match="cannot import name 'Ratoi'"):
        exec("from moved import Ratoi", {})


def test_the_warning_shows_the_line_that_uses_the_name() -> None:
    for statement in (
        "from steelyard.gradients import Pull",
        "import steelyard.gradients\nsteelyard.gradients.Pull",
    ):
        vars(steelyard.gradients).pop("Pull", None)
        (warning,) = warned_by(statement)
        assert warning.filename == "<string>"
        assert warned_by(statement) == []


def test_an_unknown_name_of_a_module_with_aliases_is_an_attribute_error() -> None:
    message = "module 'steelyard.gradients' has no attribute 'Pul'"
    with pytest.raises(AttributeError, match=message):
        _ = steelyard.gradients.Pul  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'Pul'"):
        exec("from steelyard.gradients import Pul", {})
