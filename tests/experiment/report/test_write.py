"""Writing the file, and the summary as sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.experiment.report import summary, write_report
from tests.experiment.folders import write_ablation, write_run
from tests.missing_modules import errors_without

from .parsed_page import text_of


def test_summary_is_the_first_paragraph_of_the_report(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=4)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    sentences = summary(tmp_path / "run")
    assert sentences[0] == "4 steps in 1.1 s."
    assert sentences[1].startswith("The base loss fell from ")
    assert " ".join(sentences) in text_of(page)


def test_summary_has_what_happened_to_the_run(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=4)
    change = {"step": 2, "set": [{"kl.weight": 0.2}], "requests": 9}
    (tmp_path / "run" / "changes.jsonl").write_text(json.dumps(change) + "\n")
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    sentences = summary(tmp_path / "run")
    assert sentences[-1] == "From step 2 on, kl.weight was set to 0.2."
    assert " ".join(sentences) in text_of(page)


def test_there_is_no_summary_of_an_ablation(tmp_path: Path) -> None:
    write_ablation(tmp_path / "terms")
    with pytest.raises(RunError, match=r"terms must be the folder of one run, got that of an abl"):
        summary(tmp_path / "terms")


def test_text_that_cannot_be_encoded_is_replaced(tmp_path: Path) -> None:
    samples = [{"when": "before", "step": 0, "prompt": "cut \ud83d here", "completion": ""}]
    write_run(tmp_path / "run", steps=2, samples=samples)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "cut ? here" in text_of(page)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", steps=4)
    return tmp_path / "run"


def test_an_older_report_is_replaced_and_its_folder_is_made(run: Path) -> None:
    target = run.parent / "deep" / "report.html"
    for _ in range(2):
        assert write_report([run], target) == target
    assert [each.name for each in target.parent.iterdir()] == ["report.html"]


def test_a_target_below_a_file_is_an_error(run: Path) -> None:
    (run.parent / "file").touch()
    with pytest.raises(RunError, match=r"the report cannot be written to .*report\.html"):
        write_report([run], run.parent / "file" / "report.html")


def test_a_target_that_cannot_be_written_is_an_error(run: Path) -> None:
    (run.parent / "taken").mkdir()
    with pytest.raises(RunError, match=r"the report cannot be written to .*taken"):
        write_report([run], run.parent / "taken")
    assert not list(run.parent.glob(".taken*"))


def test_without_the_extra_the_error_names_it() -> None:
    importing = "import steelyard.experiment.report"
    found = errors_without(("jinja2", "plotly"), "import steelyard.experiment", importing)
    for module, (error,) in found.items():
        assert error == (
            f"steelyard.experiment.report needs {module}, which is not installed: "
            'pip install "steelyard[report]".'
        )
