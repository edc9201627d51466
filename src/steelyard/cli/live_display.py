"""Display of a run on a terminal: a progress bar with the time left, and a table of the terms."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from steelyard.cli.term_table import TermRow, rows_of
from steelyard.experiment import redact, space_label

# Long headings break over two lines to keep the table narrow. Weight × value is the contribution
# of a term to the loss.
_FACTOR = "factor"  # shown where an aggregator put one on a gradient
_PROGRESS = "change\nby step"  # shown where it was measured
_COLUMNS = (
    "term",
    "value",
    "weight",
    "weight\n× value",
    "gradient\nnorm",
    "share",
    "cosine",
    _FACTOR,
    _PROGRESS,
    "time",
    "",
)
_STYLES = {"dominates": "yellow", "fights the base loss": "red", "no gradient": "magenta"}
_SKIPPED = "cyan"


class LiveDisplay:
    """Progress bar and table of a run, updated in place; use it as a context manager."""

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
        self._started = False

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a message above the display, with secrets blanked out."""
        self._live.console.print(Text(redact(text)))

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Show a finished step: advance the bar and replace the table."""
        description = f"loss {metrics['loss_total']:.4f}"
        # A resumed run starts after step 0; an ablation shows several runs, each from its step 0.
        if not self._started or step == 0:
            self._started = True
            self._progress.reset(self._task, total=steps, completed=step)
        self._progress.update(self._task, completed=step + 1, description=description)
        self._live.update(Group(self._progress, step_table(metrics)))

    def restore(self) -> None:
        """Show the cursor again, which the live display hides."""
        self._console.show_cursor(True)


def step_table(metrics: dict[str, Any]) -> Table:
    """Table of the terms at one step; the caption says why terms were skipped."""
    held_out = metrics.get("held_out/loss")
    title = f"step {metrics['step'] + 1}, {metrics['seconds']:.1f} s"
    if held_out is not None:
        title += f", held-out loss {held_out:.4f}"
    rows = rows_of(metrics)
    skipped = [f"{row.name} skipped: {row.skipped}" for row in rows if row.skipped is not None]
    spaces = {row.space for row in rows if row.space is not None}
    one_space = len(spaces) == 1
    if one_space:
        title += f", gradients w.r.t. {space_label(*spaces)}"
    table = Table(
        title=title,
        caption=Text(redact("\n".join(skipped)), style=_SKIPPED) if skipped else None,
        caption_justify="left",
    )
    hidden = {
        column
        for column, values in {
            _FACTOR: [row.factor for row in rows],
            _PROGRESS: [row.progress for row in rows],
        }.items()
        if all(value is None for value in values)
    }
    shown = [column for column in _COLUMNS if column not in hidden]
    for column in shown:
        table.add_column(column, justify="left" if column in ("term", "") else "right")
    for row in rows:
        cells = dict(zip(_COLUMNS, _cells(row, name_space=not one_space), strict=True))
        table.add_row(*(cells[column] for column in shown))
    return table


def _cells(row: TermRow, *, name_space: bool) -> list[Text]:
    share = _format(row.share, "{:.0%}")
    cells = [
        row.name,
        _format(row.value, "{:.4g}") + ("" if row.bound is None else f" (bound {row.bound:.3g})"),
        _format(row.weight, "{:.4g}"),
        _format(row.contribution, "{:.4g}"),
        _format(row.grad_norm, "{:.3g}"),
        f"{share} of {space_label(row.space)}" if name_space and row.space is not None else share,
        _format(row.cosine, "{:+.2f}"),
        _format(row.factor, "{:.3g}"),
        _format(row.progress, "{:+.3g}"),
        _format(None if row.seconds is None else 1000 * row.seconds, "{:.1f} ms"),
        ", ".join(row.flags) if row.skipped is None else "skipped",
    ]
    style = _SKIPPED if row.skipped is not None else _STYLES[row.flags[0]] if row.flags else ""
    return [Text(cell, style=style) for cell in cells]


def _format(value: float | None, template: str) -> str:
    return "" if value is None else template.format(value)
