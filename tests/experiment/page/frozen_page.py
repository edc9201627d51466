"""Read a frozen page back: its document and its curves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def document_of(page: Path) -> dict[str, Any]:
    """Document in a frozen page, as its scripts read it."""
    text = page.read_text(encoding="utf-8")
    (data,) = re.findall(
        r'<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL
    )
    document: dict[str, Any] = json.loads(data)
    return document


def run_of(page: Path) -> dict[str, Any]:
    """Document of the run of a frozen page."""
    run: dict[str, Any] = document_of(page)["run"]
    return run


def compared_in(page: Path) -> dict[str, Any]:
    """Document of the runs of a frozen page."""
    compare: dict[str, Any] = document_of(page)["compare"]
    return compare


def points(document: dict[str, Any], metric: str) -> tuple[list[int], list[float | None]]:
    """Steps and values of a curve."""
    curve = document["curves"][metric]
    return curve["steps"], curve["values"]


def table_of(document: dict[str, Any], title: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Texts of a table: by row and column the text of a cell, its detail and its tone."""
    (table,) = [table for table in document["tables"] if table["title"].startswith(title)]
    titles = [column["title"] for column in table["columns"]]
    return {
        row["label"]: {
            title: (cell["text"], cell["detail"], cell["tone"])
            for title, cell in zip(titles, row["cells"], strict=True)
        }
        for row in table["rows"]
    }


def everything(page: Path) -> str:
    """All texts of the document of a frozen page, as JSON."""
    return json.dumps(document_of(page), ensure_ascii=False)
