"""The notebooks run from top to bottom, and their output equals the saved one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def shown(cell: Any) -> str:
    """Output of a cell, with # for numbers, which differ between machines."""
    outputs = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
    text = "".join(o.get("text") or o["data"]["text/plain"] for o in outputs)
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.e+-]*", "#", text))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_its_saved_output(path: Path, tmp_path: Path) -> None:
    saved, fresh = read(path), read(path)
    NotebookClient(
        fresh, timeout=600, startup_timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    codes = [c for c in saved.cells if c.cell_type == "code"]
    assert [shown(c) for c in fresh.cells if c.cell_type == "code"] == [shown(c) for c in codes]
