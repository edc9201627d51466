"""Freezing a page: the file, what is in it, its security, and the summary as sentences."""

from __future__ import annotations

import html as html_escapes
import json
import re
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import RunError
from steelyard.experiment.page.app import STATIC
from steelyard.experiment.page.frozen import summary, write_report
from steelyard.output.redaction import remember
from tests.experiment.folders import flaky, specs, write_ablation, write_lines, write_run

from .frozen_page import compared_in, document_of, everything, points, run_of

EVIL = "</script><script>alert(1)</script>&amp;<b><!-- \0 \u2028"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", steps=4)
    return tmp_path / "run"


def frozen(run: Path) -> str:
    return write_report([run], run.parent / "report.html").read_text(encoding="utf-8")


def test_summary_begins_with_the_headline_of_the_page(run: Path) -> None:
    page = run_of(write_report([run], run.parent / "report.html"))
    sentences = summary(run)
    assert sentences[0] == page["headline"]
    assert sentences[0].startswith("4 steps in 1.1 s: the base loss fell from ")
    assert set(page["sentences"]) <= set(sentences)


def test_summary_has_what_happened_to_the_run(run: Path) -> None:
    change = {"step": 2, "set": [{"kl.weight": 0.2}], "requests": 9}
    (run / "changes.jsonl").write_text(json.dumps(change) + "\n")
    assert summary(run)[-1] == "From step 2 on, kl.weight = 0.2."
    (mark,) = run_of(write_report([run], run.parent / "report.html"))["changes"]
    assert (mark["step"], mark["text"]) == (2, "kl.weight = 0.2")
    assert mark["time"] == json.loads((run / "metrics.jsonl").read_text().split("\n")[2])["time"]


def test_there_is_no_summary_of_an_ablation(tmp_path: Path) -> None:
    write_ablation(tmp_path / "terms")
    with pytest.raises(RunError, match=r"terms must be the folder of one run, got that of an abl"):
        summary(tmp_path / "terms")


def test_a_run_with_a_baseline_says_what_its_terms_did(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms")
    losses = [rows[name][-1]["held_out/loss"] for name in ("all", "none")]
    text = "{:.4g} with the terms, {:.4g} without".format(*losses)
    assert text in summary(tmp_path / "terms" / "all")[0]
    assert text not in " ".join(summary(tmp_path / "terms" / "none"))
    (tmp_path / "terms" / "none" / "metrics.jsonl").unlink()
    assert "without" not in summary(tmp_path / "terms" / "all")[0]


def test_text_that_cannot_be_encoded_is_replaced(tmp_path: Path) -> None:
    samples = [{"when": "before", "step": 0, "prompt": "cut \ud83d here", "completion": ""}]
    write_run(tmp_path / "run", steps=2, samples=samples)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    prompts = document_of(page)["records"]["samples"]["prompts"]
    assert prompts[0]["prompt"] == "cut ? here"


def test_an_older_report_is_replaced_and_its_folder_is_made(run: Path) -> None:
    target = run.parent / "deep" / "report.html"
    for _ in range(2):
        assert write_report([run], target) == target
    assert [path.name for path in target.parent.iterdir()] == ["report.html"]


def test_a_target_below_a_file_is_an_error(run: Path) -> None:
    (run.parent / "file").touch()
    with pytest.raises(RunError, match=r"the report cannot be written to .*report\.html"):
        write_report([run], run.parent / "file" / "report.html")


def test_a_target_that_cannot_be_written_is_an_error(run: Path) -> None:
    (run.parent / "taken").mkdir()
    with pytest.raises(RunError, match=r"the report cannot be written to .*taken"):
        write_report([run], run.parent / "taken")
    assert not list(run.parent.glob(".taken*"))


def test_numbers_that_are_not_finite_are_gaps(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[1]["loss_total"] = float("nan")
    rows[2]["regularizers/judge/value"] = float("inf")
    rows[1]["regularizers/confidence/duration"] = float("inf")
    write_lines(run / "metrics.jsonl", rows)
    page = run_of(write_report([run], run.parent / "report.html"))
    assert points(page, "loss_total")[1][1] is None
    assert points(page, "regularizers/judge/value")[1][1] is None


def test_text_of_a_run_is_data_and_no_markup(tmp_path: Path) -> None:
    terms = [type(spec)(spec.fn, 0.1, EVIL, run_in="inline") for spec in specs()[:1]]
    terms += [flaky(*[EVIL] * 12, name=f"{EVIL}2")]
    samples = [{"when": "before", "step": 0, "prompt": EVIL, "completion": EVIL}]
    write_run(tmp_path / EVIL.replace("/", "").replace("\0", ""), terms=terms, samples=samples)
    (folder,) = tmp_path.iterdir()
    page = write_report([folder], tmp_path / "report.html")
    html = page.read_text(encoding="utf-8")
    assert EVIL not in html
    assert "<script>alert" not in html
    scripts = re.findall(r"<script[^>]*>", html)
    expected = [
        "<script>",
        '<script type="module">',
        '<script type="application/json" id="document">',
    ]
    assert sorted(scripts) == sorted(expected)
    run = run_of(page)
    assert [row["name"] for row in run["terms"]] == ["base", EVIL, f"{EVIL}2"]
    assert document_of(page)["records"]["samples"]["prompts"][0]["prompt"] == EVIL


def test_the_file_refers_to_no_address(run: Path) -> None:
    html = frozen(run)
    data = html[html.index('<script type="application/json"') :]
    outside = html.replace(data, "")
    addresses = re.findall(r"\w+://[^\s\"'<)]+", outside)
    assert [each for each in addresses if "www.w3.org" not in each and "uPlot" not in each] == []
    assert re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", html) == []
    assert "/static/" not in html
    assert re.findall(r"^import .* from ", html, re.MULTILINE) == []


def test_every_script_of_the_page_is_in_the_file_once_with_names_of_its_own(run: Path) -> None:
    html = frozen(run)
    (module,) = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    declared = r"^(?:export )?(?:async )?(?:function|class|const|let|var) (\w+)"
    names = []
    for path in STATIC.glob("*.js"):
        names += re.findall(declared, path.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(re.findall(declared, module, re.MULTILINE)) == sorted(names)
    assert len(set(names)) == len(names), "names of several files would clash"
    assert not re.search(r"^export ", module, re.MULTILINE)


def test_a_reader_without_scripts_has_the_sentences(run: Path) -> None:
    (plain,) = re.findall(r"<noscript>(.*?)</noscript>", frozen(run), re.DOTALL)
    assert html_escapes.escape(summary(run)[0]) in plain


def test_secrets_are_redacted_everywhere(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "tml-s3cr3t-in-a-run"
    monkeypatch.setenv("TINKER_API_KEY", secret)
    remember("correct-horse-battery")
    config = json.loads((run / "config.json").read_text())
    config["regularizers"][0]["options"] = {"headers": {"Authorization": "Bearer abcdefgh1234"}}
    (run / "config.json").write_text(json.dumps(config))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    skipped = {"skipped/judge": 1.0, "skipped/judge/reason": f"OSError: {secret}"}
    write_lines(run / "metrics.jsonl", [row | skipped for row in rows])
    change = {"step": 1, "set": [{"judge.weight": secret}], "requests": 0}
    write_lines(run / "changes.jsonl", [change])
    write_lines(run / "samples.jsonl", [{"when": "after", "prompt": secret, "completion": secret}])
    (run / "failure.json").write_text(
        json.dumps({"step": 4, "failed": "TermError", "failed/reason": f"at {secret}"})
    )
    (run / "result.json").write_text(json.dumps({"stopped_early": f"because of {secret}"}))
    (run / "log.txt").write_text("correct-horse-battery\n")
    html = frozen(run)
    for text in (secret, "abcdefgh1234", "correct-horse-battery"):
        assert text not in html
    assert "***" in html


@pytest.mark.parametrize("name", ["config.json", "samples.jsonl", "drivers.jsonl", "changes.jsonl"])
def test_no_file_of_a_run_is_read_through_a_link(run: Path, name: str) -> None:
    outside = run.parent / "outside"
    outside.write_text('{"step": 0, "set": [{"a": "outside"}], "prompt": "outside", "data": []}\n')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    assert "outside" not in everything(write_report([run], run.parent / "report.html"))


def test_a_long_run_is_thinned_and_small(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rows = write_run(run, steps=40)
    long = [{**rows[step % 40], "step": step, "loss_total": step % 7} for step in range(10_000)]
    long[4321]["loss_total"] = 1e9
    write_lines(run / "metrics.jsonl", long)
    page = write_report([run], tmp_path / "report.html")
    assert page.stat().st_size <= 1_500_000
    curve = run_of(page)["curves"]["loss_total"]
    assert len(curve["steps"]) <= 500
    assert max(curve["values"]) == 1e9, "a peak of one step stays"
    assert curve["steps"][-1] == 9_999


def test_a_report_of_several_runs_has_the_curves_of_each(tmp_path: Path) -> None:
    for name, steps in (("short", 3), ("long", 30)):
        write_run(tmp_path / name, steps=steps)
    document = compared_in(write_report([tmp_path / "short", tmp_path / "long"], tmp_path / "r"))
    (loss,) = [chart for chart in document["charts"] if chart["title"] == "Base loss"]
    ends = {}
    for line in loss["lines"]:
        curve: dict[str, Any] = document["views"][line["run"]]["curves"][line["metric"]]
        ends[line["label"]] = curve["steps"][-1]
    assert ends == {"short": 2, "long": 29}, "each has its own last step"
    assert document["notes"] == []
    assert [config["label"] for config in document["configs"]] == ["short", "long"]
