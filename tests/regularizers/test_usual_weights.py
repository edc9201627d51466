"""The usual weights in the docstrings of regularizers are those of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steelyard import regularizers
from steelyard.spec.registry import BUILT_IN

PAGE = (Path(__file__).parents[2] / "docs" / "regularizers.md").read_text(encoding="utf-8")
_, _, SECTION = PAGE.partition("\n## Weights\n")
SECTION, _, _ = SECTION.partition("\n## ")
NUMBER = r"\d[\d.]*(?:e-\d+)?"
DOCUMENTED = {
    name: match[1]
    for name in regularizers.__all__
    if (match := re.search(r"Usual weights: ([^,]+),", getattr(regularizers, name).__doc__ or ""))
}


def row_of(name: str) -> list[str]:
    """Cells of the row of a class in the section on weights."""
    (registered,) = [
        short
        for short, path in BUILT_IN.items()
        if path.endswith(f":{name}") and f"| `{short}`" in SECTION
    ]
    (row,) = re.findall(rf"^\| `{registered}`(.*)\|$", SECTION, re.MULTILINE)
    return [cell.strip() for cell in row.split(" | ")]


def test_some_regularizers_have_usual_weights() -> None:
    assert {"KLToReference", "ChosenNLL", "SquaredLogRatio", "WholeVocabulary"} <= set(DOCUMENTED)


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_the_numbers_of_a_docstring_stand_in_the_documentation(name: str) -> None:
    numbers = re.findall(NUMBER, DOCUMENTED[name])
    assert numbers
    assert set(numbers) <= set(re.findall(NUMBER, row_of(name)[1]))


def test_every_term_of_the_section_is_a_regularizer() -> None:
    rows = re.findall(r"^\| (`.*?) \|", SECTION, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(names) > 6
    assert names - set(BUILT_IN) - {"dpo"} == set()
