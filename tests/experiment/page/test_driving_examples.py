"""Driving examples of a run: steps, colours, sources, secrets, damaged records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.records import drivers
from steelyard.output.redaction import remember
from tests.experiment.folders import write_lines, write_run

from .frozen_page import document_of

EVIL = "</p><script>alert(1)</script>&amp;<b>"


def record(step: int = 0, term: str = "base", *pieces: Any, **datum: Any) -> dict[str, Any]:
    data = [{"line": 3, "share": 0.6, "tokens": list(pieces) or [["a", 0.6]], **datum}]
    return {"step": step, "term": term, "grad_norm": 2.0, "file": "train.jsonl", "data": data}


def load(folder: Path, *records: dict[str, Any]) -> dict[str, Any]:
    write_run(folder / "run")
    write_lines(folder / "run" / "drivers.jsonl", records)
    return drivers(folder / "run")


def one(folder: Path, *records: dict[str, Any]) -> dict[str, Any]:
    (step,) = load(folder, *records)["steps"]
    (term,) = step["terms"]
    shown: dict[str, Any] = json.loads(json.dumps(term))
    return shown


def test_colours_are_relative_to_the_strongest_token_of_the_term(tmp_path: Path) -> None:
    first = record(0, "judge", ["x", 0.0], ["y", 0.001], ["b", 0.2], ["…", None], ["c", 0.05])
    first["data"].append({"line": 9, "field": "rejected", "share": 0.4, "tokens": [["d", 0.4]]})
    term = one(tmp_path, first)
    assert (term["name"], term["color"], term["grad_norm"]) == ("judge", 2, 2.0)
    strong, weak = term["examples"]
    assert strong["tokens"] == [
        ["xy", 0.0, ""], ["b", 0.5, "20 %"], ["…", 0.0, ""], ["c", 0.125, "5 %"],
    ]  # fmt: skip
    assert weak["tokens"] == [["d", 1.0, "40 %"]]
    assert [example["source"] for example in term["examples"]] == [
        "train.jsonl, line 3",
        "train.jsonl, line 9, rejected",
    ]
    assert [example["text"] for example in term["examples"]] == ["60 %", "40 %"]


def test_the_base_loss_comes_first_and_terms_in_the_order_of_the_config(tmp_path: Path) -> None:
    names = ("length", "unknown", "base", "judge")
    (step,) = load(tmp_path, *(record(0, name) for name in names))["steps"]
    assert [(term["label"], term["color"]) for term in step["terms"]] == [
        ("base loss", None), ("judge", 2), ("length", 3), ("unknown", None),
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
    shown = load(tmp_path, *map(record, range(count)))["steps"]
    assert [step["step"] for step in shown] == steps


def test_a_run_without_records_has_none(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert drivers(tmp_path / "run")["steps"] == []


def test_a_secret_that_spans_tokens_is_redacted(tmp_path: Path) -> None:
    remember("correct-horse-battery")
    term = one(tmp_path, record(0, "base", ["my correct-", 0.1], ["horse-battery", 0.3]))
    assert term["examples"][0]["tokens"] == [["my ***", 1.0, "40 %"]]


@pytest.mark.parametrize(
    "damaged",
    [
        {"data": []},
        {"step": 0, "term": "base", "data": 3},
        {"step": 0, "term": "base", "data": [3]},
        {"step": 0, "term": "base", "file": "f", "data": []},
        record(0, "base", ["a"]),
        record(0, "base", ["a", "b"]),
        record(0, "base", 3, share="x", line={}),
    ],
)
def test_what_is_damaged_is_left_out(tmp_path: Path, damaged: dict[str, Any]) -> None:
    shown = load(tmp_path, damaged, record(1))
    assert [step["step"] for step in shown["steps"]][-1] == 1
    json.dumps(shown, allow_nan=False)


def test_the_text_of_a_datum_is_data_and_no_markup(tmp_path: Path) -> None:
    load(tmp_path, record(0, "base", [EVIL, 0.6]), record(5, "base", ["plain ", 0.0], [EVIL, 0.6]))
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert EVIL not in page.read_text(encoding="utf-8")
    steps = document_of(page)["records"]["drivers"]["steps"]
    assert [step["terms"][0]["examples"][0]["tokens"][-1][0] for step in steps] == [EVIL, EVIL]
