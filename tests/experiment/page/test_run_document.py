"""Document of one run: rows of terms and rewards, constants, changes, a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.page.run_views import RunViews
from tests.experiment.folders import write_lines, write_run

from .on_policy_runs import train_on_policy


def view(folder: Path, name: str = "run") -> dict[str, Any]:
    document = RunViews(RunIndex(folder)).view(name, smoothing=0)
    shown: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return shown


def bounded(steps: int = 8, **config: Any) -> list[dict[str, Any]]:
    at = "regularizers/kl"
    return [
        {
            "step": step, "time": 1e9 + step, "seconds": 0.5, "loss_total": 2.0,
            "base_loss/value": 1.0,
            f"{at}/value": 1.0 - 0.1 * step, f"{at}/weight": 0.5 if step < 4 else 0.0,
            f"{at}/contribution": 0.1, f"{at}/bound": 0.5,
            f"{at}/violation": max(0.0, 0.5 - 0.1 * step), f"{at}/duration": 0.002,
        }
        for step in range(steps)
    ]  # fmt: skip


def write_bounded(run: Path, rows: list[dict[str, Any]], **weight: Any) -> None:
    run.mkdir()
    term = {"use": "kl_to_reference", "name": "kl", "weight": weight}
    (run / "config.json").write_text(json.dumps({"regularizers": [term], "train": {"steps": 9}}))
    write_lines(run / "metrics.jsonl", rows)


def test_a_bounded_term_has_its_bound_and_the_range_of_its_multiplier(tmp_path: Path) -> None:
    write_bounded(tmp_path / "run", bounded(), at_most=0.5)
    base, row = view(tmp_path)["terms"]
    assert (base["label"], base["color"], base["kind"]) == ("base loss", None, "base")
    assert row["color"] == 0
    assert row["bound"] == {
        "text": "at most 0.500",
        "value": 0.5,
        "met": True,
        "text_met": "kept at 4 of 8 steps; beyond it by more than 20 % at the rest",
    }
    write_bounded(tmp_path / "short", bounded(steps=5), at_most=0.5)
    bound = view(tmp_path, "short")["terms"][1]["bound"]
    assert (bound["text"], bound["met"]) == ("at most 0.500 (20 % beyond)", True)
    weight = {"text": "0 … 0.500, last 0", "low": 0.0, "high": 0.5, "last": 0.0}
    assert row["weight"] == weight
    assert row["value"]["text"] == "0.950 → 0.350"
    assert row["texts"]["weight"] == weight["text"]
    assert row["texts"]["seconds"] == "2 ms"
    assert len(row["spark"]["steps"]) == 8
    assert "regularizers/kl/violation" in row["metrics"]


def test_a_bound_that_was_always_kept_says_so(tmp_path: Path) -> None:
    rows = [row | {"regularizers/kl/violation": 0.0} for row in bounded(2)]
    write_bounded(tmp_path / "run", rows, at_least=0.5)
    assert view(tmp_path)["terms"][1]["bound"]["text"] == "at least 0.500"
    assert view(tmp_path)["terms"][1]["bound"]["text_met"] == "kept at all 2 steps"


def test_what_never_changed_is_a_text_and_no_chart(tmp_path: Path) -> None:
    write_bounded(tmp_path / "run", bounded(), at_most=0.5)
    document = view(tmp_path)
    constants = {row["key"]: row["text"] for row in document["constants"]}
    assert constants["regularizers/kl/duration"] == "0.002"
    assert constants["seconds"] == "0.500"
    assert "regularizers/kl/bound" not in constants, "it is drawn beside the value"
    drawn = {key for chart in document["charts"] for key in chart["curves"]}
    assert not drawn & constants.keys()
    assert constants.keys() <= document["curves"].keys(), "for a reload when one changes"


def test_a_gradient_that_is_alone_in_its_space_has_no_share(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run")
    key = "regularizers/confidence/grad_space"
    write_lines(tmp_path / "run" / "metrics.jsonl", [row | {key: "projection"} for row in rows])
    by_name = {row["name"]: row for row in view(tmp_path)["terms"]}
    assert by_name["confidence"]["share"] is None
    assert by_name["confidence"]["texts"]["share"] == "alone (projection)"
    assert by_name["evenness"]["texts"]["share"].endswith(" %")


def test_the_share_and_cosine_of_a_row_are_those_of_the_statistics(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    document = view(tmp_path)
    shares = [row["share"] or 0.0 for row in document["terms"]]
    assert sum(shares) == pytest.approx(1)
    by_name = {row["name"]: row for row in document["terms"]}
    assert by_name["confidence"]["texts"]["share"].endswith(" %")
    assert by_name["length"]["share"] is None
    assert [chart["term"] for chart in document["charts"] if chart["group"] == "values"] == [
        "evenness",
        "confidence",
    ]
    assert document["terms"][0]["held_out"]["text"].count("→") == 1


def test_a_failed_run_has_its_error(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=2)
    failure = {"step": 2, "failed": "TermError", "failed/reason": "kl: no", "failed/term": "kl"}
    (tmp_path / "run" / "failure.json").write_text(json.dumps(failure))
    document = view(tmp_path)
    assert document["failure"] == {"step": 2, "error": "TermError", "reason": "kl: no"}
    assert document["findings"][0]["rule"] == "failed"
    assert "failed with TermError" in document["headline"]


def test_a_run_before_its_first_step_has_a_document(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"train": {"steps": 5}}')
    document = view(tmp_path)
    assert (document["headline"], document["planned"]) == ("No step yet.", 5)
    assert document["terms"] == document["charts"] == document["findings"] == []


def test_the_summary_follows_the_files(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "run", steps=4)
    views = RunViews(RunIndex(tmp_path))
    assert views.summary("run")["headline"].startswith("4 steps")
    views._summaries["run"].good_until = 0.0
    write_lines(tmp_path / "run" / "metrics.jsonl", rows[:3])
    assert views.summary("run")["headline"].startswith("3 of 4 steps")


def test_relatives_are_linked_both_ways(tmp_path: Path) -> None:
    write_run(tmp_path / "first", steps=2)
    write_run(tmp_path / "second", steps=2)
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    config["branch"] = {"run": "first", "step": 1}
    (tmp_path / "second" / "config.json").write_text(json.dumps(config))
    parent = {"name": "first", "step": 1, "text": "first, at step 1"}
    assert view(tmp_path, "second")["relatives"] == {"parent": parent, "branches": []}
    branch = {"name": "second", "step": 1, "text": "second, at step 1"}
    assert view(tmp_path, "first")["relatives"] == {"parent": None, "branches": [branch]}


def test_rewards_have_rows(tmp_path: Path) -> None:
    train_on_policy(tmp_path)
    rows = {row["name"]: row for row in view(tmp_path)["rewards"]}
    assert list(rows) == ["letters", "judge"]
    assert [row["color"] for row in rows.values()] == [1, 2], "behind that of the term"
    judge = rows["judge"]
    assert judge["failed"] > 0
    assert judge["texts"]["failed"] == str(judge["failed"])
    assert judge["value"]["text"].count("→") == 1
    assert judge["texts"]["held_out"].count("→") == 1
    assert judge["weight"]["last"] == 0.5
