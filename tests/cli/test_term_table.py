"""Rows of the table of terms."""

from __future__ import annotations

from steelyard.experiment.run.step_rows import rows_of

from .example_metrics import metrics, skipping


def test_a_row_has_the_numbers_of_a_term() -> None:
    base, term = rows_of(metrics())
    assert (base.name, base.value, base.share) == ("base", 2.0, 0.75)
    assert (term.name, term.value, term.weight, term.contribution) == ("t/1", 5.0, 0.1, 0.5)
    assert (term.grad_norm, term.space, term.share) == (1.0, "logprobs", 0.25)
    assert term.cosine == 0.5
    assert (term.seconds, term.skipped) == (0.002, None)


def test_without_norms_there_is_no_share() -> None:
    untracked = {key: v for key, v in metrics().items() if "norm" not in key and "cos" not in key}
    assert [(row.share, row.cosine) for row in rows_of(untracked)] == 2 * [(None, None)]


def test_a_skipped_term_has_a_row_with_its_reason() -> None:
    reason = "OSError: it is\n  away"
    *_, row = rows_of(skipping(reason))
    assert (row.name, row.skipped) == ("judge/2", "OSError: it is away")
    assert (row.value, row.contribution) == (None, None)


def test_a_long_reason_is_cut_and_a_missing_one_is_empty() -> None:
    assert rows_of(skipping("E: " + "word " * 30))[-1].skipped == "E:" + " word" * 11 + " …"
    assert rows_of(skipping(None))[-1].skipped == ""
