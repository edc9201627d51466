"""The page lists the rules as they are in the code, and shows what the doctor says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from steelyard.cli.doctor import doctor as steelyard_doctor
from steelyard.doctor.examination import RULES
from steelyard.doctor.rule import Rule

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def row(rule: Rule) -> str:
    count, of = rule.begin
    begins = "at once" if of == 1 else f"{count} of {of}"
    cells = (rule.name, rule.severity, rule.when, f"{begins}; {rule.end}", rule.cure)
    return f"| {' | '.join(cells)} |"


def test_the_page_lists_every_rule_with_its_threshold_severity_and_cure() -> None:
    _, table = PAGE.read_text(encoding="utf-8").split("|---|---|---|---|---|\n")
    assert table.splitlines() == [row(rule) for rule in RULES]


def test_the_page_shows_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, by_command, _, code, by_code = re.findall(
        r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE
    )
    printed: list[str] = []
    rows: list[dict[str, Any]] = []
    names: dict[str, Any] = {"print": printed.append, "rows": rows}
    recorded = code.replace(
        "    for finding", "    rows.append({'step': step, **metrics})\n    for finding"
    )
    exec(recorded, names)
    assert by_code.splitlines() == printed
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    config = {"train": {"learning_rate": 0.01}, "regularizers": [names["kl"]]}
    (run / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (run / "metrics.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.Exit):
        steelyard_doctor(Path("runs/first"))
    assert capsys.readouterr().out == by_command
