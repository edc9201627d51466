"""The pictures of README and docs are of this version, from `make pictures`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from steelyard._version import __version__

ROOT = Path(__file__).parents[1]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "tools" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()


@pytest.mark.parametrize("name", tool.PICTURES)
def test_a_picture_of_the_page_is_of_this_version(name: str) -> None:
    found = tool.version_in((ROOT / "docs" / "images" / name).read_bytes())
    assert found == f"steelyard {__version__}", "take them again: make pictures"


def test_every_picture_of_the_page_in_the_docs_is_taken_by_the_tool() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "watch.md", ROOT / "docs" / "report.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert set(re.findall(r"images/([\w-]+\.png)", text)) == set(tool.PICTURES)


def test_the_version_is_written_and_read() -> None:
    png = (ROOT / "docs" / "images" / "on_policy_table.png").read_bytes()
    assert tool.version_in(png) is None
    assert tool.version_in(tool.with_version(png, "9.8")) == "steelyard 9.8"
