"""Tables at the end of a command, on terminals and in pipes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pexpect
import pytest
from rich.table import Table
from rich.text import Text

from steelyard.cli.display import print_table

SCRIPT = """
from rich.table import Table
from steelyard.cli.display import print_table
table = Table("run", "a quantity with a long name", "another with a name as long")
table.add_row("without the first of the terms", "1.2345 (+0.1234 ± 0.5678)", "1.2345")
print_table(table)
"""


def wide_table() -> Table:
    table = Table(*(f"a quantity with number {index}" for index in range(9)))
    table.add_row(*(f"value {index}" for index in range(9)))
    return table


def test_a_pipe_gets_whole_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_table(wide_table())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5, "nothing is folded"
    assert all(f"a quantity with number {index}" in lines[1] for index in range(9))


@pytest.mark.parametrize("columns", [40, 120])
def test_a_terminal_gets_lines_of_its_width(columns: int, tmp_path: Path) -> None:
    # The width must be the terminal's, not that of the process that runs the tests.
    environment = {key: x for key, x in os.environ.items() if key not in ("COLUMNS", "LINES")}
    child = pexpect.spawn(
        sys.executable, ["-c", SCRIPT], dimensions=(24, columns), cwd=str(tmp_path),
        encoding="utf-8", timeout=600, env=environment,
    )  # fmt: skip
    shown = child.read()
    child.close()
    assert child.exitstatus == 0, shown
    lines = Text.from_ansi(shown.replace("\r", "")).plain.splitlines()
    assert 0 < max(map(len, lines)) <= columns
    assert (len(lines) > 5) == (columns == 40), "folded only where it must be"
