"""Display of a run on a terminal: a progress bar with the time left, and a table of the terms."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from steelyard.cli.reward_table import RewardRow, answer_facts, reward_rows
from steelyard.cli.term_table import TermRow, evaluation_values, rows_of, throughput
from steelyard.experiment import redact, space_label

# Long headings break over two lines to keep the table narrow. Weight × value is the contribution
# of a term to the loss.
_CONTRIBUTION, _SHARE, _TIME = "weight\n× value", "share", "time"
_FACTOR = "factor"  # shown where an aggregator put one on a gradient
_PROGRESS = "change\nby step"  # shown where it was measured
_COLUMNS = (
    "term",
    "value",
    "weight",
    _CONTRIBUTION,
    "gradient\nnorm",
    _SHARE,
    "cosine",
    _FACTOR,
    _PROGRESS,
    _TIME,
    "",
)
_REWARD_COLUMNS = ("name", "mean", "spread", "weight", "failed")
_TEXTS = ("term", "name", "")  # headings of the columns that are no numbers
# Ways to draw a table, of which the first one that fits the terminal is taken: without borders or
# not, and the columns that are left out.
_LAYOUTS: tuple[tuple[bool, tuple[str, ...]], ...] = (
    (False, ()),
    (True, ()),
    (True, (_TIME,)),
    (True, (_TIME, _SHARE)),
    (True, (_TIME, _SHARE, _CONTRIBUTION)),
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
        self._live.transient = not self._started  # a bar that never moved says nothing
        self._live.stop()

    def say(self, text: str) -> None:
        """Print a message above the display, with secrets blanked out."""
        self._live.console.print(Text(redact(text)))

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Show a finished step: advance the bar and replace the tables."""
        total = metrics.get("rollouts/reward")
        loss = metrics["loss_total"]
        description = f"loss {loss:.4f}" if total is None else f"reward {total:.4g}"
        # A resumed run starts after step 0; an ablation shows several runs, each from its step 0.
        if not self._started or step == 0:
            self._started = True
            self._progress.reset(self._task, total=steps, completed=step)
        self._progress.update(self._task, completed=step + 1, description=description)
        self._live.update(Group(self._progress, *step_tables(metrics, self._console)))

    def restore(self) -> None:
        """Show the cursor again, which the live display hides."""
        self._console.show_cursor(True)


def step_tables(metrics: dict[str, Any], console: Console) -> list[RenderableType]:
    """Table of the terms at one step; with rollouts also the rewards, and a line on the answers."""
    for narrow, left_out in _LAYOUTS:
        table = step_table(metrics, narrow=narrow, left_out=left_out)
        # Numbers do not wrap: less than this minimum would cut one.
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).minimum
        if needed <= console.width:
            break
    rewards = reward_rows(metrics)
    if not rewards:
        return [table]
    facts = [Text(fact) for fact in answer_facts(metrics)]
    return [table, _reward_table(rewards, narrow=narrow), Columns(facts, padding=(0, 3))]


def _reward_table(rewards: list[RewardRow], *, narrow: bool) -> Table:
    rows = [
        [
            Text(row.name),
            Text(_format(row.mean, "{:.4g}")),
            Text(_format(row.std, "{:.3g}")),
            Text(f"{row.weight:.3g}"),
            Text(str(row.failed) if row.failed else "", style="red"),
        ]
        for row in rewards
    ]
    return _table(_REWARD_COLUMNS, rows, narrow=narrow, title="rewards")


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Text]], *, narrow: bool, **options: Any
) -> Table:
    """Table in which texts wrap and numbers do not; a narrow one has no borders."""
    if narrow:
        options |= {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "show_edge": False}
    table = Table(**options)
    for index, column in enumerate(columns):
        if column in _TEXTS:
            table.add_column(column, overflow="fold")
            continue
        lines = "\n".join([column, *(row[index].plain for row in rows)]).split("\n")
        table.add_column(column, justify="right", no_wrap=True, min_width=max(map(len, lines)))
    for row in rows:
        table.add_row(*row)
    return table


def step_table(
    metrics: dict[str, Any], *, narrow: bool = False, left_out: Sequence[str] = ()
) -> Table:
    """Table of the terms at one step; the caption says why terms were skipped."""
    title = ", ".join([f"step {metrics['step']}, {metrics['seconds']:.1f} s", *throughput(metrics)])
    for quantity in ("loss", "reward"):
        held_out = metrics.get(f"held_out/{quantity}")
        if held_out is not None:
            title += f", held-out {quantity} {held_out:.4f}"
    title += "".join(f", {value}" for value in evaluation_values(metrics))
    rows = rows_of(metrics)
    skipped = [f"{row.name} skipped: {row.skipped}" for row in rows if row.skipped is not None]
    spaces = {row.space for row in rows if row.space is not None}
    one_space = len(spaces) == 1
    if one_space:
        title += f", gradients w.r.t. {space_label(*spaces)}"
    shown = [column for column in _columns(rows) if column not in left_out]
    by_column = (
        dict(zip(_COLUMNS, _cells(row, name_space=not one_space, narrow=narrow), strict=True))
        for row in rows
    )
    return _table(
        shown,
        [[cells[column] for column in shown] for cells in by_column],
        narrow=narrow,
        title=title,
        caption=Text(redact("\n".join(skipped)), style=_SKIPPED) if skipped else None,
        caption_justify="left",
    )


def _columns(rows: list[TermRow]) -> list[str]:
    """Columns that have a number; factors and changes are rare."""
    extra = {
        _FACTOR: [row.factor for row in rows],
        _PROGRESS: [row.progress for row in rows],
    }
    hidden = {column for column, values in extra.items() if all(each is None for each in values)}
    return [column for column in _COLUMNS if column not in hidden]


def _cells(row: TermRow, *, name_space: bool, narrow: bool) -> list[Text]:
    share = _format(row.share, "{:.0%}")
    bound = _format(row.bound, "\n(bound {:.3g})" if narrow else " (bound {:.3g})")
    cells = [
        row.name,
        _format(row.value, "{:.3g}") + bound,
        _format(row.weight, "{:.3g}"),
        _format(row.contribution, "{:.3g}"),
        _format(row.grad_norm, "{:.3g}"),
        f"{share} of {space_label(row.space)}" if name_space and row.space is not None else share,
        _format(row.cosine, "{:+.2f}"),
        _format(row.factor, "{:.3g}"),
        _format(row.progress, "{:+.3g}"),
        _duration(row.seconds),
        ", ".join(row.flags) if row.skipped is None else "skipped",
    ]
    style = _SKIPPED if row.skipped is not None else _STYLES[row.flags[0]] if row.flags else ""
    return [Text(cell, style=style) for cell in cells]


def _format(value: float | None, template: str) -> str:
    return "" if value is None else template.format(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
