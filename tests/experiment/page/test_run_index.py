from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import RunError
from steelyard.experiment import RunFolder
from steelyard.experiment.page import run_index
from steelyard.experiment.page.load import read_config_file
from steelyard.experiment.page.plain_files import read_last
from steelyard.experiment.page.run_index import RunIndex, RunSummary
from steelyard.experiment.run import folder
from tests.experiment.folders import write_ablation

from .conftest import STEPS


def write_run(folder: Path, rows: int = 3, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 9}, **config}))
    lines = [{"step": n, "time": 100.0 + n, "loss_total": 5.0 - n} for n in range(rows)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def age(folder: Path, seconds: float = 3600.0) -> None:
    """Make the files of a run as old as this."""
    for file in folder.iterdir():
        at = file.stat().st_mtime - seconds
        os.utime(file, (at, at))


def only(folder: Path) -> RunSummary:
    (found,) = RunIndex(folder).list()
    return found


def test_a_finished_run(trained: Path) -> None:
    found = only(trained)
    rows = RunFolder(trained / "first").metrics()
    assert (found.name, found.state, found.steps, found.planned) == ("first", "done", STEPS, STEPS)
    assert found.began == rows[0]["time"]
    assert found.first["loss_total"] == rows[0]["loss_total"]
    assert found.last["held_out/loss"] == rows[-1]["held_out/loss"]


def test_a_run_is_running_while_it_is_locked_or_fresh(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    index = RunIndex(tmp_path)
    age(run, -600.0)  # a test that is held up must not make it old
    assert [each.state for each in index.list()] == ["running"], "a step was made just now"
    age(run)
    assert [each.state for each in index.list()] == ["stopped"]
    with RunFolder(run).locked():
        age(run)
        assert [each.state for each in index.list()] == ["running"], "it loads a model"
    assert [each.state for each in index.list()] == ["stopped"], "it was killed"


def test_without_a_list_of_locks_the_last_step_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_LOCKS", tmp_path / "none")
    run = write_run(tmp_path / "run")
    with RunFolder(run).locked():
        age(run)
        assert only(tmp_path).state == "stopped"


def test_a_run_with_slow_steps_is_fresh_for_longer(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=0)
    (run / "metrics.jsonl").write_text('{"step": 0, "seconds": 1000.0}\n')
    age(run, 2000.0)
    assert only(tmp_path).state == "running"
    age(run, 2000.0)
    assert only(tmp_path).state == "stopped"


def test_only_the_first_and_the_last_line_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=2)
    first, last = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(first + b"rubbish\n" * 100_000 + last)
    found = only(tmp_path)
    assert (found.steps, found.first, found.last) == (2, {"loss_total": 5.0}, {"loss_total": 4.0})


def test_the_list_follows_what_is_added_and_removed(tmp_path: Path) -> None:
    index = RunIndex(tmp_path)
    index._next_scan = 0.0
    assert index.list() == []
    run = write_run(tmp_path / "search" / "trial-0001" / "seed-1")
    index._next_scan = 0.0
    assert [each.name for each in index.list()] == ["search/trial-0001/seed-1"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss_total": 0.5}\n')
    assert [(each.steps, each.last["loss_total"]) for each in index.list()] == [(4, 0.5)]
    (run / "config.json").unlink()
    index._next_scan = 0.0
    assert index.list() == []


def test_the_folder_may_be_a_run(tmp_path: Path) -> None:
    assert only(write_run(tmp_path / "run")).name == "."


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"train": 3}', '{"train": {"steps": "x"}}'])
def test_a_damaged_config_has_no_planned_steps(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.json").write_text(content)
    assert only(tmp_path).planned is None


@pytest.mark.parametrize("line", ["", "rubbish\n", '{"step": NaN}\n', '{"step": "3"}\n', "{}\n"])
def test_damaged_metrics_have_no_steps(tmp_path: Path, line: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text(line)
    assert only(tmp_path).steps == 0


def test_a_damaged_last_line_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("rubbish\n")
    found = only(tmp_path)
    assert (found.steps, found.last) == (3, {"loss_total": 3.0})


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside")
    watched = tmp_path / "watched"
    watched.mkdir()
    (watched / "run").symlink_to(outside)
    (watched / "half").mkdir()
    (watched / "half" / "config.json").symlink_to(outside / "config.json")
    index = RunIndex(watched)
    assert index.list() == []
    for name in ("run", "half"):
        with pytest.raises(RunError, match="run must be one of the list"):
            index.path(name)


def test_a_folder_that_becomes_a_link_is_refused(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside")
    run = write_run(tmp_path / "watched" / "run")
    index = RunIndex(tmp_path / "watched")
    assert index.path("run") == run
    run.rename(tmp_path / "gone")
    run.symlink_to(outside)
    with pytest.raises(RunError, match="run must be one of the list"):
        index.path("run")


@pytest.mark.parametrize("name", ["..", "../outside", "run/../../outside", "/", "", "run/"])
def test_a_path_that_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "outside")
    write_run(tmp_path / "watched" / "run")
    with pytest.raises(RunError, match="run must be one of the list"):
        RunIndex(tmp_path / "watched").path(name)


def test_there_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing must be a folder of runs, and it is none: give"):
        RunIndex(tmp_path / "nothing")


def test_secrets_of_a_config_are_redacted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", regularizers=[{"options": {"api_key": "sk-123456789"}}])
    assert "sk-123456789" not in str(read_config_file(run))


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    whole, huge, long = (write_run(tmp_path / name) for name in ("whole", "huge", "long"))
    number = "9" * 401
    (huge / "metrics.jsonl").write_text(
        f'{{"step": 0, "time": {number}, "loss_total": {number}, "seconds": 2}}\n'
    )
    (long / "metrics.jsonl").write_text(f'{{"step": 0, "loss_total": "{"x" * 2**23}"}}\n')
    (long / "config.json").write_text(f'{{"train": {{"steps": 9}}, "x": "{"x" * 2**23}"}}')
    found = {run.name: run for run in RunIndex(tmp_path).list()}
    assert found["whole"].last["loss_total"] == 3.0
    assert (found["huge"].began, found["huge"].last) == (None, {"seconds": 2})
    assert (found["long"].steps, found["long"].planned) == (0, None)
    assert whole.is_dir()


def test_a_run_that_cannot_be_summarised_is_listed_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "whole")
    write_run(tmp_path / "worse")

    def fails(path: Path, parse: Any) -> Any:
        if path.parent.name == "worse":
            raise OverflowError
        return read_last(path, parse)

    monkeypatch.setattr(run_index, "read_last", fails)
    assert {run.name: run.steps for run in RunIndex(tmp_path).list()} == {"whole": 3, "worse": 0}


def test_a_run_that_failed_says_so_with_its_error(tmp_path: Path) -> None:
    write_run(tmp_path / "run", rows=2)
    failure = {"step": 2, "failed": "TermError", "failed/reason": "kl: away"}
    (tmp_path / "run" / "failure.json").write_text(json.dumps(failure))
    age(tmp_path / "run")
    (run,) = RunIndex(tmp_path).list()
    assert (run.state, run.error) == ("failed", "TermError: kl: away")
    (tmp_path / "run" / "failure.json").write_text("damaged")
    (run,) = RunIndex(tmp_path).list()
    assert (run.state, run.error) == ("stopped", None)


def test_the_bounds_that_are_met_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "run", rows=1)
    row: dict[str, object] = {"step": 0}
    for name, violation in (("a", 0.0), ("b", 0.19), ("c", 0.21), ("d", "x")):
        at = f"regularizers/{name}"
        row |= {f"{at}/contribution": 1.0, f"{at}/bound": 1.0, f"{at}/violation": violation}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run,) = RunIndex(tmp_path).list()
    assert run.bounds == {"met": 2, "of": 3}
    assert run.main is None


def test_runs_of_an_ablation_and_of_a_search_are_grouped(tmp_path: Path) -> None:
    write_ablation(tmp_path / "terms", seeds=2)
    for name in ("trial-0000", "trial-0003", "seed-1/trial-0003"):
        write_run(tmp_path / "search" / name, rows=2)
    (tmp_path / "search" / "study.db").write_bytes(b"")
    index = RunIndex(tmp_path)
    runs = index.list()
    labels = {run.name: (run.group, run.label, run.seed) for run in runs}
    assert labels["terms/without-judge"] == ("terms", "without judge", "0")
    assert labels["terms/seed-1/without-judge"] == ("terms", "without judge", "1")
    assert labels["search/trial-0003"] == ("search", "trial 3", "0")
    assert labels["search/seed-1/trial-0003"] == ("search", "trial 3", "1")
    groups = {group.name: group for group in index.groups(runs)}
    assert {name: group.kind for name, group in groups.items()} == {
        "terms": "ablation", "search": "search",
    }  # fmt: skip
    row = next(row for row in groups["terms"].rows if row["label"] == "without judge")
    assert len(row["runs"]) == 2
    assert "±" in row["held_out"]
    assert index.group_path("terms") == tmp_path / "terms"
    assert index.group_path("terms/all") is None


def test_a_damaged_ablation_has_runs_by_their_folder(tmp_path: Path) -> None:
    write_ablation(tmp_path / "terms")
    for content in ("[", '{"runs": 3}', '{"seeds": {"0": 3}}', '{"runs": {"all": 3}}'):
        (tmp_path / "terms" / "ablation.json").write_text(content)
        labels = {run.label for run in RunIndex(tmp_path).list()}
        assert "without-judge" in labels
