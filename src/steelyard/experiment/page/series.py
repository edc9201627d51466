"""Curves of a run: read `metrics.jsonl` line by line as it grows, smooth and thin the columns."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from steelyard.experiment.page.plain_files import MAX_LINE, open_plain, parse_object
from steelyard.output.redaction import redact
from steelyard.output.step_metrics import short_reason, skipped_terms

Floats: TypeAlias = NDArray[np.float64]

MAX_POINTS = 2000  # of a curve
_NOT_CURVES = ("step", "time")
_MAX_STEP = 2**53  # the whole numbers that JavaScript has


@dataclass(frozen=True)
class Position:
    r"""How far a growing file was read: the end of a line, and what identifies that line.

    A resumed run cuts its metrics back to its checkpoint. Even if they have grown past `size`
    again, another line ends there, or none.

    Attributes:
        size: number of bytes up to the end of the line.
        length: number of bytes of the line; 0 before the first one.
        digest: digest of the line.

    Example:
        >>> position = Position.after(b"one\n", 4)
        >>> Position.parse(str(position)) == position
        True
    """

    size: int
    length: int
    digest: str

    @classmethod
    def after(cls, line: bytes, size: int) -> Self:
        """Position after a line that ends at byte `size`."""
        return cls(size, len(line), _digest(line))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Position in the text that `str` made of it.

        Raises:
            ValueError: the text is not of that form.
        """
        size, length, digest = text.split("-")
        found = cls(int(size), int(length), digest)
        if not 0 <= found.length <= found.size < 2**62 or found.length > MAX_LINE:
            raise ValueError(f"a line of {length} bytes cannot end at byte {size}")
        return found

    def __str__(self) -> str:
        return f"{self.size}-{self.length}-{self.digest}"

    def seek(self, file: BinaryIO) -> bool:
        """Go to this position in a file, and return whether the same line ends there."""
        file.seek(self.size - self.length)
        return _digest(file.read(self.length)) == self.digest


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:16]


@dataclass
class _Column:
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class RunSeries:
    """The metrics of a run, by key; `refresh` reads the lines that were added since.

    Hold `lock` while it is refreshed and read: requests are served by several threads.

    Attributes:
        size: number of bytes read, the end of the last complete line.
        steps: number of steps read.
        last_step: number of the last step; -1 before the first.
        damaged: number of lines that are no JSON object with a step; they are left out.
        texts: the last text of each key that has texts, such as `base_loss/grad_space`.
        skipped: steps at which a term was skipped, by its name and the shortened reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        self.size = 0
        self.steps = 0
        self.last_step = -1
        self.damaged = 0
        self.texts: dict[str, str] = {}
        self.skipped: dict[tuple[str, str], array[int]] = {}
        self._columns: dict[str, _Column] = {}
        self._last_line = b""

    def refresh(self) -> None:
        """Read the lines that were added; all of them if the file is not the one read before."""
        try:
            with open_plain(self.path) as file:
                if not self.position.seek(file):
                    self._reset()
                    file.seek(0)
                while line := file.readline(MAX_LINE):
                    # A longer line is read in parts, each of which is damaged.
                    if not line.endswith(b"\n") and len(line) < MAX_LINE:
                        break
                    self._add_line(line)
        except OSError:  # removed, not readable, or a link
            self._reset()

    @classmethod
    def of_rows(
        cls,
        path: Path,
        rows: Sequence[Mapping[str, Any]],
        columns: Mapping[str, tuple[list[int], list[float]]],
    ) -> Self:
        """Metrics of a file that was read already.

        Args:
            path: the file.
            rows: its rows, in the order of their steps.
            columns: steps and values of each metric in them.
        """
        series = cls(path)
        series.steps, series.last_step = len(rows), rows[-1]["step"]
        series._columns = {
            key: _Column(array("q", steps), array("d", map(_as_float, values)))
            for key, (steps, values) in columns.items()
            if key not in _NOT_CURVES
        }
        for row in rows:
            series._add_texts(row)
        return series

    @property
    def position(self) -> Position:
        """How far the file was read."""
        return Position.after(self._last_line, self.size)

    @property
    def keys(self) -> list[str]:
        """Keys that have numbers, in the order in which they first came."""
        return list(self._columns)

    def column(self, key: str) -> tuple[NDArray[np.int64], Floats]:
        """Steps that have a metric, and its values there."""
        found = self._columns.get(key, _Column())
        return np.array(found.steps, dtype=np.int64), np.array(found.values, dtype=np.float64)

    def _add_line(self, line: bytes) -> None:
        self.size += len(line)
        self._last_line = line
        row = parse_row(line)
        if row is None:
            self.damaged += bool(line.strip())
        else:
            self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        if step <= self.last_step:  # a step that was repeated replaces the earlier ones
            self._drop_from(step)
        self.last_step = step
        self.steps += 1
        columns = self._columns
        for key, value in row.items():
            if type(value) is float or type(value) is int:
                column = columns.get(key)
                if column is None:
                    if key in _NOT_CURVES:
                        continue
                    column = columns[key] = _Column()
                column.steps.append(step)
                column.values.append(_as_float(value))
        self._add_texts(row)

    def _add_texts(self, row: Mapping[str, Any]) -> None:
        self.texts |= {key: value for key, value in row.items() if type(value) is str}
        step = row["step"]
        for name, reason in skipped_terms(row).items():
            # Shortened, since a long reason may differ from step to step.
            why = name, short_reason(redact(reason))
            self.skipped.setdefault(why, array("q")).append(step)

    def _drop_from(self, step: int) -> None:
        for column in self._columns.values():
            while column.steps and column.steps[-1] >= step:
                column.steps.pop()
                column.values.pop()
        for steps in self.skipped.values():
            while steps and steps[-1] >= step:
                steps.pop()
        self.skipped = {why: steps for why, steps in self.skipped.items() if steps}
        self.steps = len({each for c in self._columns.values() for each in c.steps})


def smooth(values: Floats, factor: float) -> tuple[Floats, float]:
    """Exponential moving average: the mean of the values so far, with weights factor^age.

    Values that are not finite are left as they are, and have no weight.

    Returns:
        The averages, and the sum of the weights at the end: what continues the last average.
    """
    finite = np.isfinite(values)
    sums = list(itertools.accumulate(values[finite].tolist(), lambda s, value: factor * s + value))
    # 1 + factor + … + factor^(n - 1), for each number n of values.
    weights = (1 - factor ** np.arange(1, len(sums) + 1)) / (1 - factor)
    smoothed = values.copy()
    smoothed[finite] = np.array(sums) / weights
    return smoothed, float(weights[-1]) if sums else 0.0


def thin(values: Floats, points: int = MAX_POINTS) -> NDArray[np.int64]:
    """Indices of at most `points` values: the minimum and the maximum of each bucket, in order.

    The first and the last value are always among them. Peaks stay visible, which every n-th value
    or a mean would lose.
    """
    count = len(values)
    if count <= points:
        return np.arange(count)
    width = -(-count // ((points - 2) // 2))
    padded = np.full(-(-count // width) * width, np.nan)
    padded[:count] = values
    buckets = padded.reshape(-1, width)
    finite = np.isfinite(buckets)
    starts = np.arange(len(buckets)) * width
    lowest = starts + np.where(finite, buckets, np.inf).argmin(axis=1)
    highest = starts + np.where(finite, buckets, -np.inf).argmax(axis=1)
    return np.unique(np.concatenate([[0], lowest, highest, [count - 1]]))


def bucket_means(
    columns: Iterable[tuple[NDArray[np.int64], Floats]], steps: int, buckets: int
) -> tuple[list[int], list[list[float | None]]]:
    """First step of each bucket of steps, and the mean of each column there; None without values.

    Args:
        columns: steps and values of each metric.
        steps: number of steps of the run.
        buckets: largest number of buckets.
    """
    width = max(1, -(-steps // buckets))
    count = -(-steps // width)
    rows = []
    for at, values in columns:
        finite = np.isfinite(values) & (at < steps)
        place = at[finite] // width
        total = np.bincount(place, weights=values[finite], minlength=count)
        number = np.bincount(place, minlength=count)
        rows.append([round(t / n, 4) if n else None for t, n in zip(total, number, strict=True)])
    return [bucket * width for bucket in range(count)], rows


def rows_after(
    path: Path, position: Position, limit: int
) -> tuple[list[dict[str, Any]], Position] | None:
    """Rows of the complete lines after a position, and the position after them.

    Args:
        path: a JSON Lines file; one that does not exist is empty.
        position: end of a line.
        limit: largest number of bytes to read.

    Returns:
        None if another line ends at the position: the file is not the one read before.
    """
    try:
        with open_plain(path) as file:
            if not position.seek(file):
                return None
            block = file.read(limit)
    except OSError:
        return None if position.size else ([], position)
    *lines, rest = block.split(b"\n")
    if not lines:
        if len(rest) < MAX_LINE:
            return [], position
        # A line that is too long: go on behind this part of it.
        return [], Position.after(rest[-MAX_LINE:], position.size + len(rest))
    rows = [row for line in lines if (row := parse_row(line)) is not None]
    size = position.size + sum(len(line) + 1 for line in lines)
    return rows, Position.after((lines[-1] + b"\n")[-MAX_LINE:], size)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Row of a line of metrics; None if it is no JSON object with the number of a step."""
    row = parse_object(line)
    step = None if row is None else row.get("step")
    if row is None or type(step) is not int or not 0 <= step < _MAX_STEP:
        return None
    row = dict(zip(_shared_keys(tuple(row)), row.values(), strict=True))
    return _without_undefined_cosines(row)


@lru_cache(maxsize=16)  # the rows of a run have the same few sets of keys
def _shared_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first of equal keys: rows that share them take half the memory, and no time."""
    return keys


def _without_undefined_cosines(row: dict[str, Any]) -> dict[str, Any]:
    """Row without the cosines to a gradient that is 0: the metrics have them as 0."""
    norms = [key for key in _norms_in(tuple(row)) if row[key] == 0]
    if not norms:
        return row
    names = [
        "base" if key == "base_loss/grad_norm" else key[len("regularizers/") : -len("/grad_norm")]
        for key in norms
    ]
    starts, ends = tuple(f"cosines/{name}/" for name in names), tuple(f"/{n}" for n in names)
    return {
        key: value
        for key, value in row.items()
        if not (key.startswith("cosines/") and (key.startswith(starts) or key.endswith(ends)))
    }


@lru_cache(maxsize=16)
def _norms_in(keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if key.endswith("/grad_norm")]


class RedactedTexts:
    """Redacts the texts of the rows of one file; most rows have those of the row before."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._redacted: dict[str, str] = {}

    def redact(self, row: dict[str, Any]) -> dict[str, Any]:
        """Row with every secret in its texts replaced."""
        texts = {key: value for key, value in row.items() if type(value) is str}
        if texts != self._texts:
            self._texts, self._redacted = texts, redact(texts)
        return row | self._redacted


def numbers(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers of a row, the step included; None for those that are not finite, as JSON has none."""
    found = {
        key: _as_float(value)
        for key, value in row.items()
        if type(value) in (int, float) and key not in _NOT_CURVES
    }
    finite = {key: value if math.isfinite(value) else None for key, value in found.items()}
    return {"step": row["step"], **finite}


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number with more than 308 digits
        return math.inf
