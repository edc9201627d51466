"""Run folders: which contents are accepted, and which are errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.load import (
    LoadedRun,
    configured_terms,
    load_run,
    load_runs,
    term_name,
)
from tests.experiment.folders import write_ablation, write_lines, write_run

from .frozen_page import compared_in


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", steps=4)
    return tmp_path / "run"


@pytest.mark.parametrize("cut", [1, 20, 4000])
def test_an_incomplete_last_line_is_ignored(run: Path, cut: int) -> None:
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    last = len(whole.rstrip(b"\n").rpartition(b"\n")[2])
    path.write_bytes(whole[: -1 - min(cut, last - 1)])
    assert [row["step"] for row in load_runs([run]).runs[0].rows] == [0, 1, 2]


def test_a_complete_last_line_without_a_newline_counts(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(load_runs([run]).runs[0].rows) == 4


def test_a_line_cut_inside_a_character_is_ignored(run: Path) -> None:
    with (run / "samples.jsonl").open("ab") as file:
        file.write('{"prompt": "é'.encode()[:-1])
    assert len(load_runs([run]).runs[0].samples) == 4


def test_the_later_line_of_a_repeated_step_counts(run: Path) -> None:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [*rows, {**rows[2], "loss_total": 7.0}])
    found = load_runs([run]).runs[0]
    assert found.series("loss_total")[0] == [0, 1, 2, 3]
    assert found.series("loss_total")[1][2] == 7.0


def test_the_metrics_are_read_without_the_secrets_of_the_config(run: Path) -> None:
    secret = "a-secret-of-this-config"
    table = {"use": "judge", "options": {"api_key": secret}}
    (run / "config.json").write_text(json.dumps({"regularizers": [table]}))
    rows = [
        {"step": step, "skipped/judge": 1.0, "skipped/judge/reason": f"{reason} {secret}"}
        for step, reason in enumerate(["refused", "refused", "late"])
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    reasons = [row["skipped/judge/reason"] for row in load_run("run", run).rows]
    assert reasons == ["refused ***", "refused ***", "late ***"]


def test_samples_are_optional(run: Path) -> None:
    (run / "samples.jsonl").unlink()
    assert load_runs([run]).runs[0].samples == []


def test_a_custom_metric_is_not_taken_for_a_term(run: Path) -> None:
    path = run / "metrics.jsonl"
    write_lines(path, [{"step": 0, "regularizers/kl/contribution": 1.0,
                        "regularizers/kl/custom/value": 2.0}])  # fmt: skip
    assert load_runs([run]).runs[0].terms == ["kl"]


def test_runs_of_an_ablation_that_have_not_started_are_left_out(tmp_path: Path) -> None:
    write_ablation(tmp_path / "terms")
    (tmp_path / "terms" / "none" / "metrics.jsonl").unlink()
    names = [each.name for each in load_runs([tmp_path / "terms"]).runs]
    assert "all" in names
    assert "none" not in names


def test_runs_of_the_same_name_get_distinct_names(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        write_run(tmp_path / parent / "run", steps=2)
    folders = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "y" / "run"]
    document = compared_in(write_report(folders, tmp_path / "report.html"))
    assert [run["label"] for run in document["runs"]] == ["x/run", "y/run (1)", "y/run (2)"]


def test_an_ablation_among_other_runs_gives_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "one", steps=2)
    write_ablation(tmp_path / "terms")
    page = write_report([tmp_path / "one", tmp_path / "terms"], tmp_path / "report.html")
    named = [run["label"] for run in compared_in(page)["runs"]]
    assert named[:3] == ["one", "terms: all", "terms: none"]


def link_metrics(run: Path) -> None:
    (run / "metrics.jsonl").rename(run.parent / "elsewhere.jsonl")
    (run / "metrics.jsonl").symlink_to(run.parent / "elsewhere.jsonl")


def test_damaged_lines_are_left_out_and_counted(run: Path) -> None:
    path = run / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    damaged = b'{"step": null}\n[]\n{"step"\n\xff\n\n' + b"x" * 3_000_000 + b"\n"
    path.write_bytes(first + damaged + b"".join(rest))
    loaded = load_runs([run]).runs[0]
    assert [row["step"] for row in loaded.rows] == [0, 1, 2, 3]
    assert loaded.damaged >= 5


@pytest.mark.parametrize("config", ["[", "[]", "[" * 100_000, '{"train": 3, "model": []}'])
def test_a_damaged_config_says_nothing(run: Path, config: str) -> None:
    (run / "config.json").write_text(config)
    assert load_runs([run]).runs[0].config == {}
    write_report([run], run.parent / "report.html")


def test_an_ablation_reads_no_run_outside_of_its_folder(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "linked").symlink_to(run)
    runs = {"all": "../run", "none": "linked", "absolute": str(run)}
    (tmp_path / "a" / "ablation.json").write_text(json.dumps({"runs": runs}))
    with pytest.raises(RunError, match="is an ablation of which no run has begun"):
        load_runs([tmp_path / "a"])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run: (run / "config.json").unlink(), r"run is no run folder: .* missing config"),
        (lambda run: (run / "metrics.jsonl").unlink(), r"missing metrics\.jsonl\. Give the folder"),
        (lambda run: (run / "metrics.jsonl").write_text(""), r"must have at least one step, got"),
        (lambda run: (run / "metrics.jsonl").write_text("{\n{}\n"), r"at least one step, got none"),
        (link_metrics, r"metrics\.jsonl must be a file that can be read: .*metrics\.jsonl"),
        (lambda run: (run / "ablation.json").write_text("{}"), r"must have 'runs', .* got None"),
        (
            lambda run: (run / "ablation.json").write_text('{"runs": {"all": "all"}}'),
            r"is an ablation of which no run has begun",
        ),
    ],
)
def test_a_folder_that_is_not_a_run_is_an_error(run: Path, break_it: object, message: str) -> None:
    assert callable(break_it)
    break_it(run)
    with pytest.raises(RunError, match=message):
        write_report([run], run.parent / "report.html")
    assert not (run.parent / "report.html").exists()


def test_no_folder_and_a_missing_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="at least one run folder, got none"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(RunError, match=r"nowhere is no folder: a run has config.json and"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


def test_terms_are_named_in_the_order_of_the_config() -> None:
    config = {"regularizers": [{"use": "l1"}, 3, {"use": "l2", "name": "decay"}, {"use": "off"}]}
    assert [term_name(term) for term in configured_terms(config)] == ["l1", "decay", "off"]
    rows = [
        {"step": 0, "regularizers/extra/contribution": 1.0, "regularizers/decay/contribution": 1.0},
        {"step": 1, "skipped/l1": 1.0},
    ]
    assert LoadedRun("run", Path(), config, rows).terms == ["l1", "decay", "extra"]
    assert configured_terms({"regularizers": "none"}) == []


def test_series_has_the_steps_at_which_a_metric_is_a_number() -> None:
    values = [1, 0.5, True, "2", None]
    rows = [{"step": step, "m": value} for step, value in enumerate(values)]
    run = LoadedRun("run", Path(), {}, [*rows, {"step": 5}])
    assert run.series("m") == ([0, 1], [1, 0.5])


def test_an_ablation_knows_its_run_with_all_terms_and_those_without_one(tmp_path: Path) -> None:
    write_ablation(tmp_path / "terms")
    experiment = load_runs([tmp_path / "terms"])
    assert experiment.full == "all"
    assert experiment.without["judge"] == "without judge"
    assert load_runs([tmp_path / "terms" / "all"]).full is None


def test_an_ablation_of_several_seeds_has_the_runs_of_each(tmp_path: Path) -> None:
    write_ablation(tmp_path / "a", seeds=2)
    (tmp_path / "a" / "seed-1" / "none" / "metrics.jsonl").unlink()  # not begun
    experiment = load_runs([tmp_path / "a"])
    names = [run.name for run in experiment.runs]
    assert list(experiment.seeds) == ["0", "1"]
    assert [run.name for run in experiment.seeds["1"]] == [n for n in names if n != "none"]
    assert experiment.seeds["1"][0].folder == tmp_path / "a" / "seed-1" / "all"


def test_an_ablation_of_an_older_version_has_one_seed(tmp_path: Path) -> None:
    write_ablation(tmp_path / "a")
    experiment = load_runs([tmp_path / "a"])
    assert experiment.seeds == {"0": experiment.runs}


def test_answers_are_loaded_for_a_single_run_alone(run: Path, tmp_path: Path) -> None:
    write_lines(run / "rollouts.jsonl", [{"step": 0, "answer": "a"}])
    assert [len(each.rollouts) for each in load_runs([run]).runs] == [1]
    write_run(tmp_path / "other", steps=2)
    assert [len(each.rollouts) for each in load_runs([run, tmp_path / "other"]).runs] == [0, 0]
    write_lines(run / "rollouts.jsonl", [{"step": 0}])
    assert load_runs([run]).runs[0].rollouts == [], "a record without an answer"
