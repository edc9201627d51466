"""The page as a whole: escaping, the content security policy, gaps, the config."""

from __future__ import annotations

import base64
import hashlib
import html as html_escapes
import json
import re
from pathlib import Path

from steelyard.experiment.report import write_report
from steelyard.experiment.report.figure import Figure, Section, bars
from steelyard.experiment.report.page import charts_json
from tests.experiment.folders import flaky, specs, write_lines, write_run

from .conftest import Report
from .parsed_page import PageText, page_charts, series, text_of, trace_points


def test_page_shows_the_whole_config(report: Report) -> None:
    text = text_of(report.page)
    for setting in ("base_model tiny-random", "learning_rate 0.0001", "use tests:evenness"):
        assert setting in text


def test_non_finite_numbers_are_gaps(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", steps=3)
    rows[1]["loss_total"] = float("nan")
    rows[2]["regularizers/judge/value"] = float("inf")
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    drawn = page_charts(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert trace_points(drawn["loss"])["total"][1][1] is None
    assert trace_points(drawn["value-2"])["judge"] == (
        [0, 2],
        [rows[0]["regularizers/judge/value"], None],
    )


def test_factors_have_a_column_where_there_are_any(tmp_path: Path, report: Report) -> None:
    assert "cosine factor time" not in text_of(report.page)
    rows = write_run(tmp_path / "run", steps=2)
    rows = [{**row, "factors/base": 0.625, "factors/judge": 1.5} for row in rows]
    write_lines(tmp_path / "run" / "metrics.jsonl", rows)
    text = text_of(write_report([tmp_path / "run"], tmp_path / "report.html"))
    assert "cosine factor time" in text
    assert "0.625" in text


def test_user_text_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>&amp;<b>"
    terms = [type(spec)(spec.fn, 0.1, evil, run_in="inline") for spec in specs()[:1]]
    terms += [flaky(*[evil] * 12, name=f"{evil}2")]
    samples = [{"when": "before", "step": 0, "prompt": evil, "completion": evil}]
    rows = write_run(tmp_path / "run", terms=terms, samples=samples)
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    html = page.read_text(encoding="utf-8")
    assert evil not in html
    assert "<script>alert" not in html
    assert PageText(html).tags.count("script") == 3
    assert evil in text_of(page)
    assert f"skipped 12 × OSError: {evil}" in text_of(page)
    assert trace_points(page_charts(page)["value-0"]) == {
        evil: series(rows, f"regularizers/{evil}/value")
    }


def test_page_refers_to_no_other_address(report: Report) -> None:
    html = report.page.read_text(encoding="utf-8")
    assert "default-src &#39;none&#39;; script-src &#39;sha256-" in html
    outside = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert re.findall(r"https?://", outside) == []
    assert re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", html) == []


def test_charts_json_escapes_markup_and_replaces_non_finite_numbers() -> None:
    trace = bars("</script>&", [0, 1, 2], [float("nan"), float("inf"), 0.5], "c1")
    text = charts_json([Section("s", "", "", [Figure("k", "", "", [trace], size="wide")])])
    assert not set("<>&") & set(text)
    (figure,) = json.loads(text)
    assert (figure["key"], figure["size"], figure["height"]) == ("k", "wide", 300)
    (drawn,) = figure["data"]
    assert (drawn["name"], drawn["y"]) == ("</script>&", [None, None, 0.5])


def test_content_security_policy_allows_exactly_the_scripts_of_the_page(report: Report) -> None:
    page = report.page.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>\n", page, re.DOTALL)
    assert len(scripts) == 2
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    allowed = re.findall(r"'sha256-([^']+)'", html_escapes.unescape(policy[1]))
    assert allowed == digests


def header(page: Path) -> str:
    match = re.search(r'<p class="facts">(.*?)</p>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return ", ".join(re.findall(r"<span>(.*?)</span>", match[1])[:-1])  # without the date


def test_the_header_names_the_models_of_all_runs(tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(6)]
    for index, folder in enumerate(folders):
        write_run(folder, steps=2, terms=specs()[: 1 + index % 2])
        config = json.loads((folder / "config.json").read_text())
        config["model"] |= {"base_model": f"model-{index}", "rank": 8 if index else 16}
        (folder / "config.json").write_text(json.dumps(config))

    def facts(*chosen: int) -> str:
        return header(write_report([folders[i] for i in chosen], tmp_path / "report.html"))

    assert facts(1) == "model-1, rank 8, backend local, 2 regularizers"
    assert facts(0, 2) == "model-0 and model-2, rank 16 and 8, backend local, 1 regularizer"
    assert facts(1, 2) == "model-1 and model-2, rank 8, backend local, 1 to 2 regularizers"
    assert facts(*range(6)) == "6 base models, rank 16 and 8, backend local, 1 to 2 regularizers"
