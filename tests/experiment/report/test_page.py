"""The report's numbers, words and tables, against what stands in the run folders."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from steelyard.experiment.report import summary, write_report
from tests.experiment.folders import flaky, specs, write_ablation, write_lines, write_run


def charts(page: Path) -> dict[str, dict[str, Any]]:
    """The charts in a page, by name."""
    text = page.read_text(encoding="utf-8")
    found = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL
    )
    assert found is not None
    return {figure["key"]: figure for figure in json.loads(found[1])}


def traces(figure: dict[str, Any]) -> dict[str, tuple[list[Any], list[Any]]]:
    return {trace["name"]: (trace["x"], trace["y"]) for trace in figure["data"]}


class Text(HTMLParser):
    """The text of a page, without scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.words.append(data)

    @property
    def all(self) -> str:
        return " ".join(" ".join(self.words).split())


def text_of(page: Path) -> str:
    return Text(page.read_text(encoding="utf-8")).all


def column(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    there = [row for row in rows if key in row]
    return [row["step"] for row in there], [row[key] for row in there]


@pytest.fixture
def one(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    rows = write_run(tmp_path / "one")
    return write_report([tmp_path / "one"], tmp_path / "one.html"), rows


def test_every_number_in_the_charts_is_one_of_the_metrics(
    one: tuple[Path, list[dict[str, Any]]],
) -> None:
    page, rows = one
    drawn = charts(page)
    assert traces(drawn["loss"]) == {
        "total": column(rows, "loss_total"),
        "base loss": column(rows, "base_loss/value"),
    }
    assert traces(drawn["held-out"]) == {"held-out": column(rows, "held_out/loss")}
    for index, name in enumerate(["evenness", "confidence", "judge", "length"]):
        value = traces(drawn[f"value-{index}"])
        assert value == {name: column(rows, f"regularizers/{name}/value")}
        added = traces(drawn["contributions"])
        assert added[name] == column(rows, f"regularizers/{name}/contribution")
        time = traces(drawn["time-steps"])
        assert time[name] == column(rows, f"regularizers/{name}/duration")
    norms = traces(drawn["grad-norms"])
    assert norms["base loss"] == column(rows, "base_loss/grad_norm")
    assert norms["total"] == column(rows, "total_grad_norm")
    steps, pulls = column(rows, "regularizers/judge/grad_norm_weighted")
    assert norms["judge"] == (steps, pulls)
    assert steps == [0, 2, 4, 6, 8, 10]
    assert "length" not in norms


def test_shares_add_up_to_one_at_every_step(one: tuple[Path, list[dict[str, Any]]]) -> None:
    page, rows = one
    parts = traces(charts(page)["shares"])
    assert set(parts) == {"base loss", "evenness", "confidence", "judge"}
    for step, row in enumerate(rows):
        here = [values[step] for _, values in parts.values() if values[step] is not None]
        assert sum(here) == pytest.approx(1)
        norms = row["base_loss/grad_norm"] + sum(
            row.get(f"regularizers/{name}/grad_norm_weighted", 0.0)
            for name in ("evenness", "confidence", "judge")
        )
        pull = row["regularizers/confidence/grad_norm_weighted"]
        assert parts["confidence"][1][step] == pytest.approx(pull / norms)


def test_cosines_are_those_of_the_metrics(one: tuple[Path, list[dict[str, Any]]]) -> None:
    page, rows = one
    drawn = charts(page)
    heat = drawn["cosines"]["data"][0]
    assert heat["y"] == ["evenness", "confidence", "judge"]
    for name, line in zip(heat["y"], heat["z"], strict=True):
        assert line == [row.get(f"cosines/base/{name}") for row in rows]
    pairs = drawn["pairs"]["data"][0]
    assert pairs["x"] == pairs["y"] == ["base", *heat["y"]]
    matrix = pairs["z"]
    assert [matrix[i][i] for i in range(4)] == [1, 1, 1, 1]
    assert matrix[1][3] == matrix[3][1] == rows[10]["cosines/evenness/judge"]
    assert matrix[0][2] == rows[11]["cosines/base/confidence"]


def test_plotly_knows_every_chart(one: tuple[Path, list[dict[str, Any]]]) -> None:
    for figure in charts(one[0]).values():
        go.Figure({"data": figure["data"], "layout": figure["layout"]})  # raises on a wrong name


def test_the_summary_says_what_happened(one: tuple[Path, list[dict[str, Any]]]) -> None:
    page, rows = one
    text = text_of(page)
    losses = [row["loss_total"] for row in rows]
    first, last = sum(losses[:3]) / 3, sum(losses[-3:]) / 3
    moved = f"the loss fell from {first:.3f} to {last:.3f}"
    noted = f"(−{100 * (1 - last / first):.0f} %, means of the first and last 3 steps)"
    assert f"12 steps in 3.7 s: {moved} {noted}." in text
    assert "“confidence” (cosine −0.82) pulls against the base loss." in text
    assert "“length” has no gradient: measured, but with no say in training." in text
    assert "tiny-random" in text
    assert "4 regularizers" in text


def test_a_term_that_dominates_is_named(tmp_path: Path) -> None:
    terms = specs()[:2]
    strong = [terms[0], type(terms[1])(terms[1].fn, 40.0, "confidence", run_in="inline")]
    write_run(tmp_path / "run", terms=strong, steps=3)
    text = text_of(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert re.search(r"“confidence” dominates: 9\d % of the gradient is its own\.", text)


def test_skipped_steps_are_counted_by_reason(tmp_path: Path) -> None:
    failures = ["it is away", None, "the line is\nbusy", "it is away", None]
    write_run(tmp_path / "run", terms=[*specs()[:1], flaky(*failures)], steps=5)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    text = text_of(page)
    said = "OSError: it is away (2 ×) and OSError: the line is busy (1 ×)"
    assert f"“flaky” was skipped at 3 of 5 steps: {said}." in text
    assert f"2 skipped 3 × {said}" in text, "after the number of steps at which it ran"
    assert traces(charts(page)["value-1"])["flaky"][0] == [1, 4]


def test_a_term_that_was_always_skipped_is_in_the_report(tmp_path: Path) -> None:
    write_run(tmp_path / "run", terms=[flaky(*["it is away"] * 3)], steps=3)
    write_run(tmp_path / "other", terms=specs()[:1], steps=3)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    text = text_of(page)
    assert "“flaky” was skipped at 3 of 3 steps: OSError: it is away." in text
    assert "0 skipped 3 × OSError: it is away" in text
    assert "1 regularizer" in text
    assert "has no gradient" not in text
    assert {"value-0", "contributions"} & set(charts(page)) == set()
    both = write_report([tmp_path / "run", tmp_path / "other"], tmp_path / "both.html")
    assert "no gradient skipped" in text_of(both)
    assert "flaky 3 × OSError: it is away" in text_of(both)


def test_a_skipped_term_whose_reason_was_not_written_is_counted(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", terms=[flaky("away", None)], steps=2)
    del rows[0]["skipped/flaky/reason"]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    text = text_of(write_report([tmp_path / "run"], tmp_path / "report.html"))
    said = "was skipped at 1 of 2 steps: a reason that was not written down."
    assert f"“flaky” {said}" in text


def test_a_run_whose_metrics_do_not_know_of_skips_has_a_report(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", terms=[*specs()[:1], flaky("away", None)], steps=2)
    old = [{k: v for k, v in row.items() if not k.startswith("skipped/")} for row in rows]
    write_lines(tmp_path / "run" / "metrics.jsonl", old)
    text = text_of(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert "2 regularizers" in text
    assert "skipped" not in text


def test_a_term_with_two_flags_has_both(tmp_path: Path) -> None:
    terms = specs()[:2]
    strong = [terms[0], type(terms[1])(terms[1].fn, 40.0, "confidence", run_in="inline")]
    write_run(tmp_path / "run", terms=strong, steps=3)
    text = text_of(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert "3 dominates fights the base loss" in text


def test_samples_stand_side_by_side(one: tuple[Path, list[dict[str, Any]]]) -> None:
    text = text_of(one[0])
    assert "The capital of France is before Paris. (before) after Paris. (after)" in text


def test_the_config_is_there_in_full(one: tuple[Path, list[dict[str, Any]]]) -> None:
    text = text_of(one[0])
    for words in ("base_model tiny-random", "learning_rate 0.0001", "use tests:evenness"):
        assert words in text


def test_a_run_without_norms_terms_or_samples_has_a_report(tmp_path: Path) -> None:
    write_run(tmp_path / "plain", terms=[], steps=2, tracked=False, samples=[])
    page = write_report([tmp_path / "plain"], tmp_path / "plain.html")
    assert set(charts(page)) == {"loss", "held-out"}
    assert "There were no regularizers." in text_of(page)
    write_run(tmp_path / "untracked", steps=2, tracked=False)
    page = write_report([tmp_path / "untracked"], tmp_path / "untracked.html")
    assert not {"grad-norms", "shares", "cosines", "pairs"} & set(charts(page))
    assert "Gradient norms were not tracked" in text_of(page)


def test_what_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", steps=3)
    rows[1]["loss_total"] = float("nan")
    rows[2]["regularizers/judge/value"] = float("inf")
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    drawn = charts(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert traces(drawn["loss"])["total"][1][1] is None
    assert traces(drawn["value-2"])["judge"] == (
        [0, 2],
        [rows[0]["regularizers/judge/value"], None],
    )


def test_several_runs_share_each_chart(tmp_path: Path) -> None:
    rows = {name: write_run(tmp_path / name, steps=n) for name, n in (("a", 4), ("b", 6))}
    page = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html")
    drawn = charts(page)
    for key, metric in (
        ("loss_total", "loss_total"),
        ("held_out", "held_out/loss"),
        ("value-1", "regularizers/confidence/value"),
        ("norm-2", "regularizers/judge/grad_norm_weighted"),
    ):
        assert traces(drawn[key]) == {name: column(own, metric) for name, own in rows.items()}
    added = traces(drawn["contributions"])["judge"]
    assert added[0] == ["a", "b"]
    assert added[1] == [
        pytest.approx(sum(values) / len(values))
        for _, values in (column(r, "regularizers/judge/contribution") for r in rows.values())
    ]
    text = text_of(page)
    assert "2 runs compared" in text
    assert "train.steps 4 6" in text
    for figure in drawn.values():
        go.Figure({"data": figure["data"], "layout": figure["layout"]})


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        write_run(tmp_path / parent / "run", steps=2)
    folders = [tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "y" / "run"]
    drawn = charts(write_report(folders, tmp_path / "report.html"))
    assert list(traces(drawn["loss_total"])) == ["x/run", "y/run (1)", "y/run (2)"]


def test_an_ablation_says_what_leaving_out_each_term_did(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms")
    page = write_report([tmp_path / "terms"], tmp_path / "report.html")
    assert list(traces(charts(page)["held_out"])) == list(rows)
    text = text_of(page)
    assert "Ablation: terms" in text
    assert "What leaving out each term did" in text
    full = rows["all"][-1]["held_out/loss"]
    other = rows["without confidence"][-1]["held_out/loss"]
    assert f"without confidence {other:.3f} −{full - other:.3f}" in text
    assert "regularizers.confidence there – there – there there" in text


def test_an_ablation_reads_the_terms_on_held_out_data_where_it_can(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms")
    for name, value in (("all", 0.125), ("without judge", 0.625)):
        own = rows[name]
        own[-1]["held_out/regularizers/judge"] = value
        write_lines(tmp_path / "terms" / name.replace(" ", "-") / "metrics.jsonl", own)
    text = text_of(write_report([tmp_path / "terms"], tmp_path / "report.html"))
    assert "0.625 +0.500" in text


def test_an_ablation_among_other_runs_is_just_its_runs(tmp_path: Path) -> None:
    write_run(tmp_path / "one", steps=2)
    write_ablation(tmp_path / "terms")
    page = write_report([tmp_path / "one", tmp_path / "terms"], tmp_path / "report.html")
    named = list(traces(charts(page)["loss_total"]))
    assert named[:3] == ["one", "terms: all", "terms: none"]


def test_what_users_wrote_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>&amp;<b>"
    terms = [type(spec)(spec.fn, 0.1, evil, run_in="inline") for spec in specs()[:1]]
    terms += [flaky(*[evil] * 12, name=f"{evil}2")]
    samples = [{"when": "before", "step": 0, "prompt": evil, "completion": evil}]
    rows = write_run(tmp_path / "run", terms=terms, samples=samples)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    html = page.read_text(encoding="utf-8")
    assert evil not in html
    assert "<script>alert" not in html
    assert Text(html).tags.count("script") == 3
    assert evil in text_of(page)
    assert f"skipped 12 × OSError: {evil}" in text_of(page)
    assert traces(charts(page)["value-0"]) == {evil: column(rows, f"regularizers/{evil}/value")}


def test_the_page_names_no_address_it_could_ask(one: tuple[Path, list[dict[str, Any]]]) -> None:
    html = one[0].read_text(encoding="utf-8")
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in html
    outside = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert re.findall(r"https?://", outside) == []
    assert re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", html) == []


def test_the_summary_alone_is_the_first_paragraph(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=4)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    said = summary(tmp_path / "run")
    assert said[0].startswith("4 steps in 1.1 s: the loss fell from ")
    assert " ".join(said) in text_of(page)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"regularizers": [{"use": "evenness"}, {}, 3], "model": None, "train": {"steps": "x"}},
        {"regularizers": "none", "more": [1, None], "train": None},
    ],
)
def test_a_config_of_another_make_is_shown_as_it_is(tmp_path: Path, config: Any) -> None:
    write_run(tmp_path / "run", steps=2)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "Config" in text_of(page)
    write_report([tmp_path / "run", tmp_path / "run"], tmp_path / "report.html")
