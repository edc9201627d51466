"""The notebooks run from top to bottom, and their output equals the saved one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

v4: Any = nbformat.v4  # has no types
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))

# Delete the names of the notebook before. `%reset` would delete __spec__ too, which processes need.
FORGET = "_names = %who_ls\nfor _name in _names:\n    del globals()[_name]"

# What the doctor says at the end; the warnings of a kernel are its stderr, which nobody compares.
RECORD = f"""import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests.lasting_findings import doctors as _doctors
_recording = _doctors()
_made = _recording.__enter__()
del sys"""
FINDINGS = """from tests.lasting_findings import above_information as _above_information
for _doctor in _made:
    print(*_above_information(_doctor.findings), sep="\\n", end="")
_ended = _recording.__exit__(None, None, None)"""


def shown(cell: Any) -> str:
    """Output of a cell, with # for numbers, which differ between machines."""
    outputs = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
    text = "".join(o.get("text") or o["data"]["text/plain"] for o in outputs)
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.e+-]*", "#", text))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # nbformat


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) == 4


@pytest.fixture(scope="module")
def client() -> Iterator[NotebookClient]:
    """A client of one kernel for all notebooks, which import the same libraries."""
    client = NotebookClient(v4.new_notebook(), timeout=600, startup_timeout=600)
    with client.setup_kernel():
        yield client


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_its_saved_output(
    client: NotebookClient, path: Path, tmp_path: Path
) -> None:
    saved, fresh = read(path), read(path)
    forget = v4.new_code_cell(f"{FORGET}\n%cd -q {tmp_path}")
    before = v4.new_notebook(cells=[forget, v4.new_code_cell(RECORD)])
    after = v4.new_notebook(cells=[v4.new_code_cell(FINDINGS)])
    for notebook in (before, fresh, after):
        client.nb = notebook
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
    assert shown(after.cells[0]) == ""
    codes = [c for c in saved.cells if c.cell_type == "code"]
    assert [shown(c) for c in fresh.cells if c.cell_type == "code"] == [shown(c) for c in codes]
