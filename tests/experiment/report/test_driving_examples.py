"""Driving examples in the report: steps, colours, sources, secrets, damaged records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import RunError
from steelyard.experiment.report import write_report
from steelyard.experiment.report.driving_examples import DrivenTerm, Span, driving_examples
from steelyard.experiment.report.load import LoadedRun, load_runs
from steelyard.experiment.secrets import remember
from tests.experiment.folders import write_lines, write_run

from .parsed_page import PageText, text_of

EVIL = "</p><script>alert(1)</script>&amp;<b>"


def record(step: int = 0, term: str = "base", *pieces: Any, **datum: Any) -> dict[str, Any]:
    data = [{"line": 3, "share": 0.6, "tokens": list(pieces) or [["a", 0.6]], **datum}]
    return {"step": step, "term": term, "grad_norm": 2.0, "file": "train.jsonl", "data": data}


def load(folder: Path, *records: dict[str, Any]) -> LoadedRun:
    write_run(folder / "run")
    write_lines(folder / "run" / "drivers.jsonl", records)
    (run,) = load_runs([folder / "run"]).runs
    return run


def one(folder: Path, *records: dict[str, Any]) -> DrivenTerm:
    ((term,),) = driving_examples(load(folder, *records)).values()
    return term


def test_colours_are_relative_to_the_strongest_token_of_the_term(tmp_path: Path) -> None:
    first = record(0, "judge", ["x", 0.0], ["y", 0.001], ["b", 0.2], ["…", None], ["c", 0.05])
    first["data"].append({"line": 9, "field": "rejected", "share": 0.4, "tokens": [["d", 0.4]]})
    term = one(tmp_path, first)
    assert (term.name, term.index, term.grad_norm) == ("judge", 2, 2.0)
    strong, weak = term.examples
    assert strong.spans == [
        Span("xy"), Span("b", 0.5, "20 %"), Span("…"), Span("c", 0.125, "5 %"),
    ]  # fmt: skip
    assert [span.strong for span in strong.spans] == [False, True, False, False]
    assert weak.spans == [Span("d", 1.0, "40 %")]
    assert [example.source for example in term.examples] == [
        "train.jsonl, line 3",
        "train.jsonl, line 9, rejected",
    ]


def test_the_base_loss_comes_first_and_terms_of_no_line_of_metrics_are_left_out(
    tmp_path: Path,
) -> None:
    names = ("unknown", "length", "base", "judge")
    found = driving_examples(load(tmp_path, *(record(0, name) for name in names)))
    assert [(term.name, term.index) for term in found[0]] == [
        ("base", None), ("judge", 2), ("length", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("count", "steps"),
    [
        (12, list(range(12))),
        (13, [0, 2, 4, 6, 8, 10, 12]),
        (30, [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]),
    ],
)
def test_of_many_steps_some_are_shown_with_the_last(
    tmp_path: Path, count: int, steps: list[int]
) -> None:
    assert list(driving_examples(load(tmp_path, *map(record, range(count))))) == steps


def test_a_run_without_records_has_no_section(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert "Which examples drive" not in text_of(write_report([tmp_path / "run"], tmp_path / "r"))
    write_lines(tmp_path / "run" / "drivers.jsonl", [])
    assert "Which examples drive" not in text_of(write_report([tmp_path / "run"], tmp_path / "r"))


def test_a_secret_that_spans_tokens_is_redacted(tmp_path: Path) -> None:
    remember("correct-horse-battery")
    term = one(tmp_path, record(0, "base", ["my correct-", 0.1], ["horse-battery", 0.3]))
    assert [(span.text, span.title) for span in term.examples[0].spans] == [("my ***", "40 %")]


@pytest.mark.parametrize(
    "damaged",
    [
        {"data": []},
        {"step": 0, "term": "base", "data": [3]},
        {"step": 0, "term": "base", "file": "f", "data": []},
        record(0, "base", ["a"]),
        record(0, "base", ["a", "b"]),
    ],
)
def test_a_damaged_record_is_an_error_that_names_the_file(
    tmp_path: Path, damaged: dict[str, Any]
) -> None:
    run = load(tmp_path, damaged)
    message = r"drivers\.jsonl must hold records as a run writes them, and one is damaged: \w+: "
    with pytest.raises(RunError, match=message):
        driving_examples(run)


def test_the_text_of_a_datum_is_shown_as_text(tmp_path: Path) -> None:
    load(tmp_path, record(0, "base", [EVIL, 0.6]), record(5, "base", ["plain ", 0.0], [EVIL, 0.6]))
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    html = page.read_text(encoding="utf-8")
    assert EVIL not in html
    assert PageText(html).tags.count("script") == 3
    text = text_of(page)
    assert text.count(EVIL) == 2
    assert "60 % train.jsonl, line 3" in text
    assert "base loss step 5, gradient norm 2.000" in text
    assert html.count('class="driven"') == 2
    assert html.count('data-step="0" hidden') == 1
