from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steelyard.experiment import RunFolder
from steelyard.experiment.page.load import load_run
from steelyard.experiment.page.plain_files import MAX_LINE
from steelyard.experiment.page.series import (
    Position,
    RunSeries,
    bucket_means,
    numbers,
    rows_after,
    smooth,
    thin,
)

from .conftest import STEPS

CURVES = arrays(
    np.float64,
    st.integers(0, 300),
    elements=st.floats(-1e6, 1e6, allow_subnormal=False) | st.just(math.nan) | st.just(math.inf),
)
START = Position.after(b"", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def lines(steps: range, **values: Any) -> str:
    return "".join(f"{json.dumps({'step': n, 'loss': float(n), **values})}\n" for n in steps)


def points(series: RunSeries, key: str = "loss") -> list[tuple[int, float]]:
    steps, values = series.column(key)
    return list(zip(steps.tolist(), values.tolist(), strict=True))


def refreshed(file: Path) -> RunSeries:
    series = RunSeries(file)
    series.refresh()
    return series


def test_columns_are_those_of_the_run(trained: Path) -> None:
    run = RunFolder(trained / "first")
    series = refreshed(run.metrics_file)
    rows = run.metrics()
    for key in ("loss_total", "regularizers/kl/value", "cosines/base/l2", "held_out/loss"):
        assert points(series, key) == [(row["step"], row[key]) for row in rows if key in row]
    assert series.steps == STEPS
    assert series.size == run.metrics_file.stat().st_size
    assert series.texts["base_loss/grad_space"] == "logprobs"
    ((why, at),) = series.skipped.items()
    assert why == ("failing", "RuntimeError: the knowledge base is down")
    assert list(at) == list(range(STEPS))


def test_curves_of_a_loaded_run_are_those_of_its_file(trained: Path) -> None:
    """A report reads the metrics of its run once."""
    run = trained / "first"
    series, loaded = refreshed(run / "metrics.jsonl"), load_run("first", run).curves()
    assert loaded.keys == series.keys
    for key in series.keys:
        assert points(loaded, key) == points(series, key)
    for attribute in ("steps", "last_step", "damaged", "texts", "skipped"):
        assert getattr(loaded, attribute) == getattr(series, attribute)


def test_only_what_was_added_is_read(file: Path) -> None:
    file.write_text(lines(range(2)))
    series = refreshed(file)
    whole = file.read_bytes()
    file.write_bytes(b"x" * (len(whole) - len(b'{"step": 1, "loss": 1.0}\n')) + whole[-25:])
    with file.open("a") as opened:
        opened.write(lines(range(2, 3)) + '{"step": 3, "lo')
    series.refresh()
    assert points(series) == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert series.damaged == 0
    with file.open("a") as opened:
        opened.write('ss": 3.0}\n')
    series.refresh()
    assert points(series)[-1] == (3, 3.0)


def test_a_file_that_was_cut_is_read_again(file: Path) -> None:
    file.write_text(lines(range(5)))
    series = refreshed(file)
    position = series.position
    file.write_text(lines(range(2)))
    series.refresh()
    assert (len(points(series)), series.steps, series.last_step) == (2, 2, 1)
    assert rows_after(file, position, 10_000) is None


def test_a_file_that_was_cut_and_has_grown_again_is_read_again(file: Path) -> None:
    file.write_text(lines(range(5)))
    series = refreshed(file)
    position = series.position
    file.write_text(lines(range(3)) + lines(range(3, 9), other=1.0))
    series.refresh()
    assert len(points(series)) == 9
    assert len(points(series, "other")) == 6
    assert rows_after(file, position, 10_000) is None


def test_a_repeated_step_replaces_the_earlier_ones(file: Path) -> None:
    file.write_text(lines(range(4)) + '{"step": 2, "loss": 9.0}\n')
    series = refreshed(file)
    assert points(series) == [(0, 0.0), (1, 1.0), (2, 9.0)]
    assert series.steps == 3


def skip(step: int, reason: str) -> str:
    return json.dumps({"step": step, "skipped/judge": 1.0, "skipped/judge/reason": reason}) + "\n"


def test_skips_of_repeated_steps_count_once(file: Path) -> None:
    file.write_text("".join(skip(step, "OSError: away") for step in (0, 1, 2, 1)))
    skipped = refreshed(file).skipped
    assert {why: list(at) for why, at in skipped.items()} == {("judge", "OSError: away"): [0, 1]}


def test_skips_are_counted_by_the_reason_that_is_shown(file: Path) -> None:
    words = "OSError: " + "word " * 20
    file.write_text("".join(skip(step, f"{words} request {step}") for step in range(3)))
    (at,) = refreshed(file).skipped.values()
    assert list(at) == [0, 1, 2]


def test_damaged_lines_are_counted_and_left_out(file: Path) -> None:
    bad = [
        "rubbish",
        "[1]",
        '{"loss": 1.0}',
        '{"step": -1}',
        '{"step": 1.5}',
        f'{{"step": {10**30}}}',
    ]
    file.write_text("\n".join(bad) + "\n\n" + lines(range(1)))
    series = refreshed(file)
    assert (points(series), series.damaged) == ([(0, 0.0)], len(bad))


def test_numbers_that_are_not_finite(file: Path) -> None:
    file.write_text(f'{{"step": 0, "a": NaN, "b": -Infinity, "c": {10**400}, "d": true}}\n')
    series = refreshed(file)
    assert [math.isfinite(series.column(key)[1][0]) for key in "abc"] == [False] * 3
    assert "d" not in series.keys
    added = rows_after(file, START, 10_000)
    assert added is not None
    (row,), _ = added
    assert numbers(row) == {"step": 0, "a": None, "b": None, "c": None}


def test_a_gradient_of_zero_has_no_cosines(file: Path) -> None:
    norms = {"base_loss/grad_norm": 1.0, "regularizers/l2/grad_norm": 1.0}
    cosines = {"cosines/base/kl": 0.0, "cosines/kl/l2": 0.0, "cosines/base/l2": -0.5}
    rows = [
        {"step": step, **norms, "regularizers/kl/grad_norm": norm, **cosines}
        for step, norm in enumerate([0.0, 2.0])
    ]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    series = refreshed(file)
    assert points(series, "cosines/base/kl") == points(series, "cosines/kl/l2") == [(1, 0.0)]
    assert points(series, "cosines/base/l2") == [(0, -0.5), (1, -0.5)]


def test_a_file_that_is_gone_has_no_rows(file: Path) -> None:
    file.write_text(lines(range(2)))
    series = refreshed(file)
    file.unlink()
    series.refresh()
    assert (series.steps, series.keys, series.size) == (0, [], 0)


def test_a_file_that_is_a_link_has_no_rows(file: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text(lines(range(2)))
    file.symlink_to(tmp_path / "outside")
    assert refreshed(file).keys == []
    assert rows_after(file, START, 10_000) == ([], START)


def test_rows_after_a_position(file: Path) -> None:
    first, rest = lines(range(2)), lines(range(2, 4))
    file.write_text(first + rest + '{"step": 4')
    for limit, steps, size in (
        (len(first) + 3, [0, 1], len(first)),
        (10_000, [0, 1, 2, 3], len(first + rest)),
        (5, [], 0),
    ):
        added = rows_after(file, START, limit)
        assert added is not None
        rows, position = added
        assert ([row["step"] for row in rows], position.size) == (steps, size)
    file.write_text(first)
    position = refreshed(file).position
    file.write_text(first + rest)
    added = rows_after(file, position, 10_000)
    assert added is not None
    assert [row["step"] for row in added[0]] == [2, 3]
    assert added[1] == refreshed(file).position


def test_a_file_that_is_not_there_yet_is_the_one_read_before(file: Path) -> None:
    position = refreshed(file).position
    assert rows_after(file, position, 10_000) == ([], position)
    file.write_text(lines(range(2)))
    position = refreshed(file).position
    file.unlink()
    assert rows_after(file, position, 10_000) is None


@pytest.mark.parametrize(
    "text", ["", "1", "x-0-a", "0-1-a", "-1-0-a", "0--1-a", f"{2**63 - 1}-0-a", "9999999-9999999-a"]
)
def test_what_is_no_position(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Position.parse(text)


@given(CURVES, st.integers(6, 60))
def test_thinning_keeps_the_extremes_of_every_part(values: np.ndarray, most: int) -> None:
    at = thin(values, most)
    assert len(at) <= most
    assert list(at) == sorted(set(at))
    if len(values) <= most:
        assert list(at) == list(range(len(values)))
        return
    assert {0, len(values) - 1} <= set(at)
    # By hand, bucket by bucket.
    width = math.ceil(len(values) / ((most - 2) // 2))
    for start in range(0, len(values), width):
        part = values[start : start + width]
        finite = part[np.isfinite(part)]
        kept = values[[each for each in at if start <= each < start + width]]
        if len(finite):
            assert np.nanmin(kept[np.isfinite(kept)]) == finite.min()
            assert np.nanmax(kept[np.isfinite(kept)]) == finite.max()


@given(CURVES, st.floats(0.0, 0.99))
def test_smoothing_is_that_of_pandas(values: np.ndarray, factor: float) -> None:
    finite = np.isfinite(values)
    expected = values.copy()
    expected[finite] = pd.Series(values[finite]).ewm(alpha=1 - factor).mean()
    smoothed, weight = smooth(values, factor)
    np.testing.assert_allclose(smoothed, expected, rtol=1e-9, atol=1e-6)
    # The page continues the average with the next value.
    if finite.any():
        kept = factor * weight
        after = (kept * smoothed[finite][-1] + 1.5) / (kept + 1)
        assert after == pytest.approx(smooth(np.append(values, 1.5), factor)[0][-1], abs=1e-6)


def test_means_of_buckets_of_steps() -> None:
    steps = np.array([0, 1, 3, 6])
    values = np.array([1.0, 3.0, math.nan, 5.0])
    starts, (row,) = bucket_means([(steps, values)], 7, 4)
    assert (starts, row) == ([0, 2, 4, 6], [2.0, None, None, 5.0])
    assert bucket_means([], 0, 4) == ([], [])


def test_a_line_that_is_too_long_is_read_in_parts_and_left_out(file: Path) -> None:
    """No part of it is kept or read twice, and a page that follows the run goes on behind it."""
    text = f'{{"step": 1, "text": "{"x" * (5 * MAX_LINE)}"}}\n'
    file.write_text(lines(range(1)) + text + lines(range(2, 4)))
    series = refreshed(file)
    assert points(series) == [(0, 0.0), (2, 2.0), (3, 3.0)]
    assert (series.size, series.damaged > 0) == (file.stat().st_size, True)
    position, found = START, list[dict[str, Any]]()
    while (after := rows_after(file, position, 2 * MAX_LINE)) and after[1] != position:
        position = Position.parse(str(after[1]))
        found += after[0]
    assert [row["step"] for row in found] == [0, 2, 3]
    assert position.size == file.stat().st_size
