"""Reading run folders: what is tolerated, and what is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.experiment.report import write_report
from steelyard.experiment.report.load import read
from tests.experiment.folders import write_ablation, write_lines, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", steps=4)
    return tmp_path / "run"


@pytest.mark.parametrize("cut", [1, 20, 4000])
def test_a_last_line_that_is_half_written_does_not_count(run: Path, cut: int) -> None:
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    last = len(whole.rstrip(b"\n").rpartition(b"\n")[2])
    path.write_bytes(whole[: -1 - min(cut, last - 1)])
    assert [row["step"] for row in read([run]).runs[0].rows] == [0, 1, 2]


def test_a_last_line_without_its_newline_counts(run: Path) -> None:
    path = run / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read([run]).runs[0].rows) == 4


def test_a_line_cut_within_a_letter_does_not_count(run: Path) -> None:
    with (run / "samples.jsonl").open("ab") as file:
        file.write('{"prompt": "é'.encode()[:-1])
    assert len(read([run]).runs[0].samples) == 4


def test_a_step_made_again_counts_once_and_the_later_line_holds(run: Path) -> None:
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [*rows, {**rows[2], "loss_total": 7.0}])
    found = read([run]).runs[0]
    assert found.series("loss_total")[0] == [0, 1, 2, 3]
    assert found.series("loss_total")[1][2] == 7.0


def test_samples_are_optional(run: Path) -> None:
    (run / "samples.jsonl").unlink()
    assert read([run]).runs[0].samples == []


def test_a_metric_of_a_term_is_not_taken_for_a_term(run: Path) -> None:
    path = run / "metrics.jsonl"
    write_lines(path, [{"step": 0, "regularizers/kl/contribution": 1.0,
                        "regularizers/kl/custom/value": 2.0}])  # fmt: skip
    assert read([run]).runs[0].terms == ["kl"]


def test_runs_of_an_ablation_that_have_not_begun_are_left_out(tmp_path: Path) -> None:
    write_ablation(tmp_path / "terms")
    (tmp_path / "terms" / "none" / "metrics.jsonl").unlink()
    names = [each.name for each in read([tmp_path / "terms"]).runs]
    assert "all" in names
    assert "none" not in names


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run: (run / "config.json").unlink(), r"run is no run folder: .* missing config"),
        (lambda run: (run / "metrics.jsonl").unlink(), r"missing metrics\.jsonl\. Give the folder"),
        (lambda run: (run / "metrics.jsonl").write_text(""), r"must have at least one step, got"),
        (lambda run: (run / "metrics.jsonl").write_text("{\n{}\n"), r"line 1, must be JSON: "),
        (lambda run: (run / "metrics.jsonl").write_text("{}\n"), r"line 1, must .* with 'step'"),
        (lambda run: (run / "config.json").write_text("["), r"config\.json must be JSON, got"),
        (lambda run: (run / "config.json").write_text("[]"), r"must be a JSON object, got a list"),
        (lambda run: (run / "ablation.json").write_text("{}"), r"must have 'runs', .* got None"),
        (
            lambda run: (run / "ablation.json").write_text('{"runs": {"all": "all"}}'),
            r"is an ablation of which no run has begun",
        ),
    ],
)
def test_what_is_no_run_is_a_clear_error(run: Path, break_it: object, message: str) -> None:
    assert callable(break_it)
    break_it(run)
    with pytest.raises(RunError, match=message):
        write_report([run], run.parent / "report.html")
    assert not (run.parent / "report.html").exists()


def test_no_folder_and_a_folder_that_is_not_there_are_errors(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="at least one run folder, got none"):
        write_report([], tmp_path / "report.html")
    with pytest.raises(RunError, match=r"nowhere is no folder: a run has config.json and"):
        write_report([tmp_path / "nowhere"], tmp_path / "report.html")


def test_the_report_replaces_an_older_one_and_makes_its_folder(run: Path) -> None:
    target = run.parent / "deep" / "report.html"
    for _ in range(2):
        assert write_report([run], target) == target
    assert [each.name for each in target.parent.iterdir()] == ["report.html"]


def test_a_place_that_cannot_be_written_is_an_error(run: Path) -> None:
    (run.parent / "taken").mkdir()
    with pytest.raises(RunError, match=r"the report cannot be written to .*taken"):
        write_report([run], run.parent / "taken")
    assert not list(run.parent.glob(".taken*"))


@pytest.mark.parametrize("module", ["jinja2", "plotly"])
def test_without_the_extra_the_error_names_it(module: str) -> None:
    code = f"""
import sys; sys.modules[{module!r}] = None
from steelyard.errors import MissingExtraError
try:
    import steelyard.experiment.report
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        f"steelyard.experiment.report needs {module}, which is not installed: "
        f'pip install "steelyard[report]".'
    )
