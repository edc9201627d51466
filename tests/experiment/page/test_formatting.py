"""Numbers as text, and the sentences of the summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from steelyard.doctor.finding import Finding, Severity
from steelyard.experiment.page.formatting import (
    cosine,
    format_change,
    join_names,
    number,
    percent,
    seconds,
    skip_count,
    skip_reasons,
)
from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.load import LoadedRun
from steelyard.experiment.page.run_statistics import Change, RunStatistics, TermStatistics
from steelyard.experiment.page.sentences import (
    finding_sentences,
    headline,
    summarize,
    summarize_runs,
)
from steelyard.output.step_metrics import Gradient
from tests.experiment.folders import flaky, specs, write_lines, write_run

from .frozen_page import compared_in, document_of, points, table_of


def test_summary_of_a_run(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run")
    page = document_of(write_report([tmp_path / "run"], tmp_path / "report.html"))["run"]
    losses = [row["base_loss/value"] for row in rows]
    first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    change = (
        f"the base loss fell from {first:.3f} to {last:.3f} (−{100 * (1 - last / first):.0f} %)"
    )
    assert page["headline"].startswith(f"12 steps in 3.7 s: {change}, held-out fell from ")
    # The weight of evenness rises up to step 5; from then on judge runs at every second step.
    total = "The total loss, over the 4 steps with the same terms and weights, fell from"
    assert page["sentences"][0].startswith(total)
    cosines = {row["name"]: row["texts"]["cosine"] for row in page["terms"]}
    assert cosines["confidence"] == "−0.82"
    assert "no gradient" in [finding["rule"] for finding in page["findings"]]
    assert {"tiny-random", "4 regularizers"} <= set(page["facts"])


def test_skipped_steps_are_counted_by_reason(tmp_path: Path) -> None:
    failures = ["it is away", None, "the line is\nbusy", "it is away", None]
    write_run(tmp_path / "run", terms=[*specs()[:1], flaky(*failures)], steps=5)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    shown = document_of(page)["run"]
    reasons = "OSError: it is away (2 ×) and OSError: the line is busy (1 ×)"
    assert f"“flaky” was skipped at 3 of 5 steps: {reasons}." in shown["sentences"]
    row = shown["terms"][2]
    assert (row["skipped"], row["texts"]["steps"]) == (f"3 ×: {reasons}", "2 of 5")
    assert points(shown, "regularizers/flaky/value")[0] == [1, 4]


def test_report_has_a_term_that_was_always_skipped(tmp_path: Path) -> None:
    write_run(tmp_path / "run", terms=[flaky(*["it is away"] * 3)], steps=3)
    write_run(tmp_path / "other", terms=specs()[:1], steps=3)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    shown = document_of(page)["run"]
    assert "“flaky” was skipped at 3 of 3 steps: OSError: it is away." in shown["sentences"]
    row = shown["terms"][1]
    assert (row["name"], row["texts"]["steps"], row["value"]) == ("flaky", "0 of 3", None)
    assert row["skipped"] == "3 ×: OSError: it is away"
    assert "1 regularizer" in shown["facts"]
    assert "no gradient" not in [finding["rule"] for finding in shown["findings"]]
    assert {"values", "contributions"} & {chart["group"] for chart in shown["charts"]} == set()
    both = compared_in(write_report([tmp_path / "run", tmp_path / "other"], tmp_path / "both.html"))
    skipped = {name: row["skipped"][0] for name, row in table_of(both, "Runs").items()}
    assert skipped == {"run": "flaky 3 × (OSError: it is away)", "other": "–"}


def test_skips_without_a_reason_are_counted(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", terms=[flaky("away", None)], steps=2)
    del rows[0]["skipped/flaky/reason"]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    shown = document_of(page)["run"]
    expected = "was skipped at 1 of 2 steps: an unrecorded reason."
    assert f"“flaky” {expected}" in shown["sentences"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (-0.5, "−0.500"),
        (0.01, "0.010"),
        (0.00999, "0.01"),
        (0.00012345, "0.00012"),
        (0.00009, "9.0e-05"),
        (99.9994, "99.999"),
        (100.0, "100.0"),
        (-1e5, "−1.0e+05"),
        (float("inf"), "inf"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_signed_numbers_and_percentages() -> None:
    assert [number(value, signed=True) for value in (0.0, 2.0, -2.0)] == ["0", "+2.000", "−2.000"]
    assert [percent(value, signed=True) for value in (0.0, 0.5, -0.005)] == [
        "0 %",
        "+50 %",
        "−0.5 %",
    ]
    assert percent(None) == percent(float("nan")) == "–"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0421, "42 ms"), (0.1, "100 ms"), (1.0, "1.0 s"), (60.0, "1 min 0 s"),
     (3600.0, "1 h 0 min"), (0.0, "0 ms"), (0.00994, "9.9 ms"), (0.00996, "10 ms"),
     (0.0996, "100 ms"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (59.94, "59.9 s"),
     (59.97, "1 min 0 s"), (119.7, "2 min 0 s"), (3599.4, "59 min 59 s"), (3599.7, "1 h 0 min"),
     (7199.0, "2 h 0 min")],
)  # fmt: skip
def test_durations(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_cosines_names_and_changes() -> None:
    assert [cosine(value) for value in (1.0, -0.004, -0.005001)] == ["+1.00", "0.00", "−0.01"]
    assert [join_names(names) for names in ([], ["a", "b"])] == ["–", "a and b"]
    assert [format_change(None), format_change(Change(2.0, 1.0))] == [
        "not measured",
        "from 2.000 to 1.000",
    ]


def run_of(
    *terms: TermStatistics,
    loss: Change | None = None,
    tracked: bool = True,
    findings: Sequence[Finding] = (),
) -> RunStatistics:
    base = TermStatistics("base", gradient=Gradient(1.0, "logprobs"))
    return RunStatistics(
        4, 4, loss, None, None, 4 if tracked else 0, base, terms, findings=findings
    )


def test_summary_of_an_unfinished_run_whose_loss_did_not_change() -> None:
    base = TermStatistics("base", value=Change(2.0, 2.0))
    found = RunStatistics(1, 3, Change(2.0, 2.0), Change(3.0, 1.0), 90.0, 1, base)
    result = "the base loss stayed at 2.000, held-out fell from 3.000 to 1.000 (−67 %)"
    start = f"1 of 3 steps in 1 min 30 s: {result}."
    assert headline(LoadedRun("run", Path(), {}, []), found) == start
    assert summarize(found) == ["There were no regularizers."]
    assert finding_sentences(found) == ["The doctor has nothing to warn of."]


def test_summary_of_findings_the_worst_first() -> None:
    def finding(severity: Severity, what: str, ended: int | None = None) -> Finding:
        return Finding("rule", "run", severity, what, "2 of 3", "", "do less", 1, ended)

    findings = [
        finding("information", "a detail"),
        finding("warning", "it is odd"),
        finding("problem", "it is bad"),
        finding("problem", "it was bad", ended=2),
    ]
    assert finding_sentences(run_of(loss=Change(1.0, 2.0, 1, 4), findings=findings)) == [
        "Problem: It is bad; 2 of 3. Do less.",
        "Warning: It is odd; 2 of 3. Do less.",
    ]


def test_summary_without_findings_or_norms() -> None:
    assert summarize(run_of(TermStatistics("a"), tracked=False)) == [
        "The total loss is not compared: its terms or weights changed from step to step.",
        "Gradient norms were not tracked: shares and cosines are unknown.",
    ]


def test_summary_says_which_gradients_are_not_comparable() -> None:
    size = Gradient(1.0, "hidden_states+parameters", 1.0, alone=True)
    sentences = summarize(run_of(TermStatistics("size", gradient=size)))
    assert sentences[-2] == (
        "The gradient of “size” is with respect to the hidden states and parameters and not "
        "comparable with that of the base loss."
    )


def test_a_cut_reason_is_not_followed_by_a_full_stop() -> None:
    term = TermStatistics("judge", skipped={"OSError: it …": 3})
    assert (skip_count(term), skip_reasons(term)) == (3, "OSError: it …")
    sentence = summarize(run_of(term))[1]
    assert sentence == "“judge” was skipped at 3 of 4 steps: OSError: it …"


def test_summary_of_several_runs_names_the_best_and_the_worst() -> None:
    runs = [LoadedRun(name, Path(), {}, []) for name in "abc"]
    found = [
        RunStatistics(2, None, None, held_out, None, 0, TermStatistics("base"))
        for held_out in (Change(3.0, 2.0), None, Change(3.0, 1.0))
    ]
    assert summarize_runs(runs, found) == [
        "3 runs, 6 steps in all.",
        "The held-out loss ends lowest in “c” (1.000) and highest in “a” (2.000).",
    ]
    assert summarize_runs(runs[:2], found[:2]) == ["2 runs, 4 steps in all."]


def measured() -> RunStatistics:
    """Statistics of a run with held-out losses."""
    return RunStatistics(2, None, None, Change(3.0, 2.0), None, 0, TermStatistics("base"))


def test_equal_losses_have_no_best() -> None:
    runs = [LoadedRun(name, Path(), {}, []) for name in "ab"]
    found = [
        RunStatistics(2, None, None, Change(3.0, 2.0), None, 0, TermStatistics("base"))
        for _ in runs
    ]
    assert (
        summarize_runs(runs, found)[1] == "The held-out loss ends at 2.000 in each run that has it."
    )


def test_runs_with_other_data_or_losses_are_not_compared() -> None:
    configs = [
        {"data": {"path": "a.jsonl"}, "loss": {"use": "cross_entropy"}},
        {"data": {"path": "b.jsonl"}, "loss": {"use": "dpo"}},
    ]
    runs = [LoadedRun(name, Path(), given, []) for name, given in zip("ab", configs, strict=True)]
    found = [
        RunStatistics(2, None, None, Change(3.0, 2.0), None, 0, TermStatistics("base"))
        for _ in runs
    ]
    assert summarize_runs(runs, found)[1] == (
        "Their data and base losses differ, so held-out losses are not compared."
    )


@pytest.mark.parametrize("same", [True, False])
def test_data_are_compared_by_what_they_are_and_not_by_their_path(same: bool) -> None:
    runs = [
        LoadedRun(
            name,
            Path(),
            {"data": {"path": f"{name}.jsonl", "held_out": "held_out.jsonl", "max_length": 8}},
            [],
            data={f"{name}.jsonl": "0d1", "held_out.jsonl": "7f3" if same else f"7f{name}"},
        )
        for name in "ab"
    ]
    found = [
        RunStatistics(2, None, None, Change(3.0, 2.0), None, 0, TermStatistics("base"))
        for _ in runs
    ]
    differ = "Their data differ, so held-out losses are not compared."
    assert (summarize_runs(runs, found)[1] == differ) == (not same)


def test_runs_of_different_length_are_compared_with_their_steps() -> None:
    runs = [LoadedRun(name, Path(), {}, []) for name in "ab"]
    found = [
        RunStatistics(steps, None, None, Change(3.0, loss), None, 0, TermStatistics("base"))
        for steps, loss in ((10, 2.0), (40, 1.0))
    ]
    assert summarize_runs(runs, found)[1] == (
        "The held-out loss ends lowest in “b” (1.000 after 40 steps) and highest in “a” (2.000 "
        "after 10 steps)."
    )
