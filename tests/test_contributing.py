"""CONTRIBUTING.md: the files and the names that it mentions exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SUFFIXES = (".html", ".md", ".py", ".toml", ".txt")
MOST_FILES = 4


def is_path(word: str) -> bool:
    return re.fullmatch(r"[\w./-]+", word) is not None and ("/" in word or word.endswith(SUFFIXES))


def quoted(text: str) -> list[str]:
    """The words in backticks."""
    return [word for span in re.findall(r"`([^`]+)`", text) for word in span.split()]


def paths_in(text: str) -> list[str]:
    """The paths in backticks and in links; `.venv` is made by `make`."""
    words = [*quoted(text), *re.findall(r"\]\(([^)]+)\)", text)]
    return [word for word in words if is_path(word) and not word.startswith(".venv")]


def found(path: str) -> list[Path]:
    """The places where a path exists: from the root, or from the package."""
    return [
        folder / path for folder in (ROOT, ROOT / "src" / "steelyard") if (folder / path).exists()
    ]


def rows() -> list[tuple[str, str]]:
    """The rows of "Where to change what"."""
    _, _, section = TEXT.partition("## Where to change what\n")
    section, _, _ = section.partition("\n## ")
    return [
        (row[0], row[1]) for row in re.findall(r"^\| (.+?) \| (.+) \|$", section, re.MULTILINE)
    ][1:]


@pytest.mark.parametrize("path", sorted(set(paths_in(TEXT))))
def test_a_path_exists(path: str) -> None:
    assert found(path)


def test_a_wrong_path_would_be_found() -> None:
    text = "see `cli/nothing.py`, [a page](docs/nothing.md) and `cli/app.py`"
    assert [path for path in paths_in(text) if not found(path)] == [
        "cli/nothing.py",
        "docs/nothing.md",
    ]


def test_there_are_rows() -> None:
    assert len(rows()) > 15


@pytest.mark.parametrize("cell", [cell for _, cell in rows()], ids=[change for change, _ in rows()])
def test_a_change_needs_few_files_and_they_hold_the_names(cell: str) -> None:
    paths = paths_in(cell)
    assert len(paths) <= MOST_FILES
    assert paths or cell == "see below"
    places = [place for path in paths for place in found(path)]
    files = [file for each in places for file in ([each] if each.is_file() else each.glob("*.py"))]
    source = "\n".join(file.read_text(encoding="utf-8") for file in files)
    names = [part for word in quoted(cell) if not is_path(word) for part in word.split(".")]
    identifiers = [name for name in names if name.isidentifier()]
    assert [name for name in identifiers if name not in source] == []
