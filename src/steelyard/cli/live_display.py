"""A run on a terminal: a bar with the time left, and a table of the terms."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from steelyard.cli.term_table import TermRow, rows_of
from steelyard.experiment import redact

_COLUMNS = ("term", "value", "weight", "adds", "pulls", "share", "cosine", "time", "")
_STYLES = {"dominates": "yellow", "fights the base loss": "red", "no gradient": "magenta"}
_SKIPPED = "cyan"


class Display:
    """The live display of a run; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task("waiting", total=None)
        self._live = Live(self._progress, console=console, refresh_per_second=4, transient=False)
        self._begun = False

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print it above the display."""
        self._live.console.print(Text(redact(text)))

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Show where the run is."""
        described = f"loss {metrics['loss_total']:.4f}"
        if not self._begun or step == 0:
            self._begun = True
            self._progress.reset(self._task, total=steps, completed=step)
        self._progress.update(self._task, completed=step + 1, description=described)
        self._live.update(Group(self._progress, table(metrics)))

    def restore(self) -> None:
        """Give the terminal back as it was."""
        self._console.show_cursor(True)


def table(metrics: dict[str, Any]) -> Table:
    """The terms of a step; below them why terms were skipped."""
    held = metrics.get("held_out/loss")
    title = f"step {metrics['step'] + 1}, {metrics['seconds']:.1f} s"
    rows = rows_of(metrics)
    skipped = [f"{row.name} skipped: {row.skipped}" for row in rows if row.skipped is not None]
    made = Table(
        title=title if held is None else f"{title}, held-out loss {held:.4f}",
        caption=Text(redact("\n".join(skipped)), style=_SKIPPED) if skipped else None,
        caption_justify="left",
    )
    for column in _COLUMNS:
        made.add_column(column, justify="left" if column in ("term", "") else "right")
    for row in rows:
        made.add_row(*_cells(row))
    return made


def _cells(row: TermRow) -> list[Text]:
    cells = [
        row.name,
        _shown(row.value, "{:.4g}"),
        _shown(row.weight, "{:.4g}"),
        _shown(row.contribution, "{:.4g}"),
        _shown(row.grad_norm, "{:.3g}"),
        _shown(row.share, "{:.0%}"),
        _shown(row.cosine, "{:+.2f}"),
        _shown(None if row.seconds is None else 1000 * row.seconds, "{:.1f} ms"),
        ", ".join(row.flags) if row.skipped is None else "skipped",
    ]
    style = _SKIPPED if row.skipped is not None else _STYLES[row.flags[0]] if row.flags else ""
    return [Text(cell, style=style) for cell in cells]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
