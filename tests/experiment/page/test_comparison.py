"""Documents of several runs: live groups, tables of terms, notes on sums, marks, baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import RunError
from steelyard.experiment.page.comparison import baseline_of
from steelyard.experiment.page.run_index import RunIndex
from steelyard.experiment.page.run_views import RunViews
from tests.experiment.folders import specs, write_ablation, write_lines, write_run

from .frozen_page import table_of


def compare(folder: Path, *names: str, group: str | None = None) -> dict[str, Any]:
    document = RunViews(RunIndex(folder)).compare(names, group)
    shown: dict[str, Any] = json.loads(json.dumps(document, allow_nan=False))
    return shown


def test_an_ablation_opens_as_a_group(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms", seeds=2)
    document = compare(tmp_path, group="terms")
    assert document["kind"] == "ablation"
    assert [run["name"] for run in document["runs"]][:2] == ["terms/all", "terms/none"]
    assert [run["color"] for run in document["runs"]] == list(range(len(rows)))
    drawn = {line["run"] for chart in document["charts"] for line in chart["lines"]}
    assert drawn == {run["name"] for run in document["runs"]} == document["views"].keys()
    assert document["charts"][0]["title"] == "Held-out loss"
    assert all("position" in view for view in document["views"].values()), "for the events"


def test_runs_have_a_row_each_with_first_and_last_values(tmp_path: Path) -> None:
    rows = write_run(tmp_path / "a", steps=8)
    write_run(tmp_path / "b", steps=4)
    document = compare(tmp_path, "a", "b")
    table = table_of(document, "Runs")
    losses = [row["base_loss/value"] for row in rows]
    ends = sum(losses[:2]) / 2, sum(losses[-2:]) / 2
    assert table["a"]["base loss"][0] == "{:.3f} → {:.3f}".format(*ends)
    assert [table[name]["steps"][0] for name in "ab"] == ["8", "4"]
    held_out = [row["held_out/loss"] for row in rows if "held_out/loss" in row]
    assert table["a"]["held-out loss"][0] == f"{held_out[0]:.3f} → {held_out[-1]:.3f}"
    contributions = [row["regularizers/confidence/contribution"] for row in rows]
    mean = sum(contributions) / len(rows)
    assert table_of(document, "Contributions")["a"]["confidence"][0] == f"{mean:.3f}"
    shares = table_of(document, "Share of the gradient")["a"]
    assert shares["length"][0] == "–"
    assert shares["confidence"][0].endswith(" %")


@pytest.mark.parametrize("key", ["loss_total", "held_out/loss"])
def test_total_losses_of_other_terms_have_a_note_and_held_out_losses_have_none(
    tmp_path: Path, key: str
) -> None:
    write_run(tmp_path / "a", steps=4)
    write_run(tmp_path / "b", steps=4, terms=specs()[:1])
    document = compare(tmp_path, "a", "b")
    (chart,) = [c for c in document["charts"] if c["lines"][0]["metric"] == key]
    note = "Total losses: these are sums of different terms or weights, and are not comparable."
    assert chart["note"] == (note if key == "loss_total" else "")
    assert document["notes"] == [note]


def test_runs_of_the_same_terms_and_weights_have_no_note(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=4)
    assert compare(tmp_path, "a", "b")["notes"] == []


def test_each_change_is_a_mark_with_its_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, steps=4)
    change = {"step": 2, "set": [{"kl.weight": 0.2}], "requests": 0}
    write_lines(tmp_path / "b" / "changes.jsonl", [change])
    marks = compare(tmp_path, "a", "b")["changes"]
    assert marks == [{"step": 2, "text": "kl.weight = 0.2", "run": "b"}]


def test_runs_that_differ_in_their_seed_alone_are_a_group(tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "second", "third")):
        write_run(tmp_path / name, steps=4)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["train"]["seed"] = seed
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    write_run(tmp_path / "other", steps=5)
    views = RunViews(RunIndex(tmp_path))
    (group,) = views.list()["groups"]
    assert (group["name"], group["kind"]) == ("first", "seeds")
    assert sorted(group["runs"]) == ["first", "second", "third"]
    assert group["rows"][0]["held_out"].count("±") == 1
    document = views.compare((), "first")
    assert document["kind"] == "seeds"
    assert sorted(row["key"] for row in document["differences"]) == ["train.seed"]


def test_a_repetition_with_the_same_seed_is_no_group(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name, steps=2)
    assert RunViews(RunIndex(tmp_path)).list()["groups"] == []


def test_what_is_not_listed_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "run", steps=2)
    views = RunViews(RunIndex(tmp_path / "a"))
    for names, group in (((), None), (("..",), None), ((), ".."), ((), "run")):
        with pytest.raises(RunError):
            views.compare(names, group)


def test_the_baseline_of_a_run_is_the_one_without_terms_beside_it(tmp_path: Path) -> None:
    write_ablation(tmp_path / "terms")
    baseline = baseline_of(tmp_path / "terms" / "all")
    assert baseline is not None
    assert baseline.without == tmp_path / "terms" / "none"
    assert " with the terms, " in baseline.sentence
    assert baseline_of(tmp_path / "terms" / "without-judge") is None
    document = RunViews(RunIndex(tmp_path)).view("terms/all", smoothing=0)
    assert document["baseline"] == {"run": "terms/none", "group": "terms"}
    assert baseline.sentence in document["headline"]
    # A page of the run alone reads nothing beside its folder.
    alone = RunViews(RunIndex(tmp_path / "terms" / "all")).view(".", smoothing=0)
    assert alone["baseline"] is None
