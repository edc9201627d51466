"""Displays of a run, live on a terminal or as plain lines, and tables at the end of a command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from steelyard.cli.doctor import COLORS
from steelyard.cli.exit_codes import Interruption
from steelyard.doctor.finding import Finding, worst_first
from steelyard.experiment.run.log import Watcher
from steelyard.experiment.run.step_rows import (
    RewardRow,
    TermRow,
    answer_facts,
    evaluation_values,
    reward_rows,
    rows_of,
    throughput,
)
from steelyard.output.redaction import redact

# Long headings break over two lines to keep the table narrow. Weight × value is the contribution
# of a term to the loss.
_CONTRIBUTION, _SHARE, _TIME = "weight\n× value", "share", "time"
_FACTOR = "factor"  # shown where an aggregator put one on a gradient
_PROGRESS = "change\nby step"  # shown where it was measured
_FINDING = "finding"  # the doctor's, or that the term was skipped; shown where there is one
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
    _FINDING,
)
_REWARD_COLUMNS = ("name", "mean", "spread", "weight")
_TEXTS = ("term", "name", _FINDING)  # headings of the columns that are no numbers
# Ways to draw a table, of which the first one that fits the terminal is taken: without borders or
# not, and the columns that are left out.
_LAYOUTS: tuple[tuple[bool, tuple[str, ...]], ...] = (
    (False, ()),
    (True, ()),
    (True, (_TIME,)),
    (True, (_TIME, _SHARE)),
    (True, (_TIME, _SHARE, _CONTRIBUTION)),
)
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
        self._findings: list[Finding] = []

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

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:
        """Print findings above the display; those that last are marked in its tables."""
        self._findings = list(lasting)
        for finding in changed:
            style = "" if finding.ended is not None else COLORS[finding.severity]
            self._live.console.print(Text(redact(finding.line), style=style))

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
        self._live.update(
            Group(self._progress, *step_tables(metrics, self._console, self._findings))
        )

    def restore(self) -> None:
        """Show the cursor again, which the live display hides."""
        self._console.show_cursor(True)


def step_tables(
    metrics: dict[str, Any], console: Console, findings: Sequence[Finding] = ()
) -> list[RenderableType]:
    """Table of the terms at one step; with rollouts also the rewards, and a line on the answers."""
    for narrow, left_out in _LAYOUTS:
        table = step_table(metrics, findings, narrow=narrow, left_out=left_out)
        # Numbers do not wrap: less than this minimum would cut one.
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).minimum
        if needed <= console.width:
            break
    rewards = reward_rows(metrics)
    marks = _marks(findings)
    own = {"regularizers/", "rewards/"}
    others = [finding for finding in findings if not finding.subject.startswith(tuple(own))]
    below: list[RenderableType] = [
        Text(f"{finding.rule}: {finding.evidence}", style=COLORS[finding.severity])
        for finding in others
    ]
    if not rewards:
        return [table, *below]
    facts = [Text(fact) for fact in answer_facts(metrics)]
    shown = _reward_table(rewards, marks, narrow=narrow)
    return [table, shown, Columns(facts, padding=(0, 3)), *below]


def _marks(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """Findings by their subject, the most severe ones first."""
    marks: dict[str, list[Finding]] = {}
    for finding in worst_first(findings):
        marks.setdefault(finding.subject, []).append(finding)
    return marks


def _mark(marks: Sequence[Finding]) -> Text:
    """Names of the rules of some findings, in the color of the first."""
    style = COLORS[marks[0].severity] if marks else ""
    return Text(", ".join(finding.rule for finding in marks), style=style)


def _reward_table(
    rewards: list[RewardRow], marks: Mapping[str, Sequence[Finding]], *, narrow: bool
) -> Table:
    # With one reward its gradient is that of the base loss.
    compared = any(row.cosine is not None for row in rewards)
    found = any(f"rewards/{row.name}" in marks for row in rewards)
    columns = (
        *_REWARD_COLUMNS,
        *(("share", "cosine") if compared else ()),
        "failed",
        *((_FINDING,) if found else ()),
    )
    rows = [
        [
            Text(row.name),
            Text(_format(row.mean, "{:.4g}")),
            Text(_format(row.std, "{:.3g}")),
            Text(f"{row.weight:.3g}"),
            *([_share_of(row), Text(_format(row.cosine, "{:+.2f}"))] if compared else []),
            Text(str(row.failed) if row.failed else "", style="red"),
            *([_mark(marks.get(f"rewards/{row.name}", ()))] if found else []),
        ]
        for row in rewards
    ]
    return _table(columns, rows, narrow=narrow, title="rewards")


def _share_of(row: RewardRow) -> Text:
    return Text(_format(row.share, "{:.0%}"))


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
    metrics: dict[str, Any],
    findings: Sequence[Finding] = (),
    *,
    narrow: bool = False,
    left_out: Sequence[str] = (),
) -> Table:
    """Table of the terms at one step, with the findings that last at that step.

    The caption says why terms were skipped.
    """
    title = ", ".join([f"step {metrics['step']}, {metrics['seconds']:.1f} s", *throughput(metrics)])
    for quantity in ("loss", "reward"):
        held_out = metrics.get(f"held_out/{quantity}")
        if held_out is not None:
            title += f", held-out {quantity} {held_out:.4f}"
    title += "".join(f", {value}" for value in evaluation_values(metrics))
    rows = rows_of(metrics)
    skipped = [f"{row.name} skipped: {row.skipped}" for row in rows if row.skipped is not None]
    spaces = {row.space_label for row in rows if row.space is not None}
    one_space = len(spaces) == 1
    if one_space:
        title += f", gradients w.r.t. {next(iter(spaces))}"
    marks = _marks(findings)
    shown = [column for column in _columns(rows, marks) if column not in left_out]
    by_column = (
        dict(
            zip(
                _COLUMNS,
                _cells(
                    row,
                    marks.get(f"regularizers/{row.name}", ()),
                    name_space=not one_space,
                    narrow=narrow,
                ),
                strict=True,
            )
        )
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


def _columns(rows: list[TermRow], marks: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Columns that are not empty; factors, changes and findings are rare."""
    extra: dict[str, list[Any]] = {
        _FACTOR: [row.factor for row in rows],
        _PROGRESS: [row.progress for row in rows],
        _FINDING: [
            marks.get(f"regularizers/{row.name}") if row.skipped is None else row.skipped
            for row in rows
        ],
    }
    hidden = {column for column, values in extra.items() if all(value is None for value in values)}
    return [column for column in _COLUMNS if column not in hidden]


def _cells(row: TermRow, marks: Sequence[Finding], *, name_space: bool, narrow: bool) -> list[Text]:
    share = _format(row.share, "{:.0%}")
    bound = _format(row.bound, "\n(bound {:.3g})" if narrow else " (bound {:.3g})")
    cells = [
        row.name,
        _format(row.value, "{:.3g}") + bound,
        _format(row.weight, "{:.3g}"),
        _format(row.contribution, "{:.3g}"),
        _format(row.grad_norm, "{:.3g}"),
        f"{share} of {row.space_label}" if name_space and row.space is not None else share,
        _format(row.cosine, "{:+.2f}"),
        _format(row.factor, "{:.3g}"),
        _format(row.progress, "{:+.3g}"),
        _duration(row.seconds),
        _mark(marks).plain if row.skipped is None else "skipped",
    ]
    style = _mark(marks).style if row.skipped is None else _SKIPPED
    return [Text(cell, style=style) for cell in cells]


def _format(value: float | None, template: str) -> str:
    return "" if value is None else template.format(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


class TextDisplay:
    """One line for each step and each message; a context manager like `LiveDisplay`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        return

    def say(self, text: str) -> None:
        """Print a message, with secrets blanked out."""
        sys.stdout.write(f"{redact(text)}\n")
        sys.stdout.flush()

    def findings(self, changed: Sequence[Finding], lasting: Sequence[Finding]) -> None:  # noqa: ARG002 - said before
        """Print findings that begin or end."""
        for finding in changed:
            self.say(finding.line)

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Print the loss of a step and the contribution of each term; also the rewards, if any.

        A line begins with the step, from 0 as in `metrics.jsonl`, and how many are done.
        """
        self._step(f"step {step} ({step + 1}/{steps})", metrics)

    def step_of(self, run: str, step: int, steps: int, metrics: dict[str, Any]) -> None:
        """Print a step of one of several runs: the name of the run, and the line of `step`."""
        self._step(f"{run}: step {step} ({step + 1}/{steps})", metrics)

    def _step(self, beginning: str, metrics: dict[str, Any]) -> None:
        base, *terms = rows_of(metrics)
        fields = [beginning]
        fields += [f"{row.name} {row.text}" for row in reward_rows(metrics)]
        fields += [*answer_facts(metrics), f"loss {metrics['loss_total']:.4f}"]
        fields.append(f"base {base.value:.4f}")
        for row in terms:
            contribution = "skipped" if row.contribution is None else f"{row.contribution:+.4f}"
            fields.append(f"{row.name} {contribution}")
        fields += throughput(metrics)
        if "held_out/loss" in metrics:
            fields.append(f"held-out {metrics['held_out/loss']:.4f}")
        if "held_out/reward" in metrics:
            fields.append(f"held-out reward {metrics['held_out/reward']:.4f}")
        fields += evaluation_values(metrics)
        self.say("  ".join(fields))

    def restore(self) -> None:
        """Do nothing: plain lines leave no terminal state to restore."""


T = TypeVar("T")

_STOPPING = "Finishing this step, then saving. Ctrl-C again ends at once."


def run_with_display(run: Callable[[Watcher, Callable[[], bool]], T]) -> T:
    """Return the result of `run(watch, stop)`; `stop()` is True once Ctrl-C was pressed.

    The display is live on a terminal, plain lines otherwise.
    """
    # A second progress bar would break the live display.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it has no types
    display = LiveDisplay(Console()) if sys.stdout.isatty() else TextDisplay()
    with Interruption(lambda: display.say(_STOPPING), display.restore) as interruption, display:
        return run(display, interruption.requested)


def default_run_folder(config: Path) -> Path:
    """Folder of a run for which none was given: `runs/<config>-<time>`."""
    return Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def print_table(table: Table) -> None:
    """Print a table: folded to the width of a terminal, as wide as it needs in a file or pipe."""
    console = Console()
    if not console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        console.width = max(console.width, needed)
    console.print(table)
