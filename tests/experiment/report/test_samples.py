"""Completions side by side."""

from __future__ import annotations

from pathlib import Path

from steelyard.experiment.report.load import LoadedRun
from steelyard.experiment.report.samples import collect_samples

from .conftest import Report
from .parsed_page import text_of


def test_report_shows_completions_before_and_after(report: Report) -> None:
    text = text_of(report.page)
    assert "The capital of France is before Paris. (before) after Paris. (after)" in text


def sampled(name: str, **completions: str) -> LoadedRun:
    """A run with one prompt, "2 + 2 =", and its completions by time."""
    samples = [
        {"when": when, "prompt": "2 + 2 =", "completion": completion}
        for when, completion in completions.items()
    ]
    return LoadedRun(name, Path(), {}, [], samples)


def test_runs_of_one_model_share_the_column_before() -> None:
    runs = [sampled("a", before="5", after="4"), sampled("b", before="5", after="3")]
    found = collect_samples(runs)
    assert found.headings == ["before", "after · a", "after · b"]
    assert found.prompts == {"2 + 2 =": {"before": "5", "after · a": "4", "after · b": "3"}}


def test_runs_that_start_differently_have_columns_of_their_own() -> None:
    runs = [sampled("a", before="5"), sampled("b", before="6"), sampled("c")]
    found = collect_samples(runs)
    assert found.headings == ["before · a", "before · b"]
    assert found.prompts["2 + 2 ="] == {"before · a": "5", "before · b": "6"}


def test_a_single_run_has_plain_headings() -> None:
    assert collect_samples([sampled("a", before="", after="4")]).headings == ["before", "after"]
    assert collect_samples([sampled("a")]).prompts == {}
