"""Read a report back: its charts, its traces and its visible text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


def page_charts(page: Path) -> dict[str, dict[str, Any]]:
    """Charts in a page, by key."""
    text = page.read_text(encoding="utf-8")
    match = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL
    )
    assert match is not None
    return {figure["key"]: figure for figure in json.loads(match[1])}


def trace_points(figure: dict[str, Any]) -> dict[str, tuple[list[Any], list[Any]]]:
    """Steps and values of each trace of a chart, by the trace's name."""
    return {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]}


class PageText(HTMLParser):
    """Visible text of a page, without scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.texts.append(data)

    @property
    def all(self) -> str:
        return " ".join(" ".join(self.texts).split())


def text_of(page: Path) -> str:
    return PageText(page.read_text(encoding="utf-8")).all


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps that have a metric, and its values."""
    points = [row for row in rows if key in row]
    return [row["step"] for row in points], [row[key] for row in points]
