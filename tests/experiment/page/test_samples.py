"""Completions side by side."""

from __future__ import annotations

from steelyard.experiment.page.records import sample_table


def sampled(name: str, **completions: str) -> tuple[str, list[dict[str, str]]]:
    """A run with one prompt, "2 + 2 =", and its completions by time."""
    samples = [
        {"when": when, "prompt": "2 + 2 =", "completion": completion}
        for when, completion in completions.items()
    ]
    return name, samples


def test_runs_of_one_model_share_the_column_before() -> None:
    runs = [sampled("a", before="5", after="4"), sampled("b", before="5", after="3")]
    found = sample_table(runs)
    assert found["headings"] == ["before", "after · a", "after · b"]
    answers = {"before": "5", "after · a": "4", "after · b": "3"}
    assert found["prompts"] == [{"prompt": "2 + 2 =", "answers": answers}]


def test_runs_that_start_differently_have_columns_of_their_own() -> None:
    runs = [sampled("a", before="5"), sampled("b", before="6"), sampled("c")]
    found = sample_table(runs)
    assert found["headings"] == ["before · a", "before · b"]
    assert found["prompts"][0]["answers"] == {"before · a": "5", "before · b": "6"}


def test_a_single_run_has_plain_headings() -> None:
    assert sample_table([sampled("a", before="", after="4")])["headings"] == ["before", "after"]
    assert sample_table([sampled("a")])["prompts"] == []
