"""The table of an ablation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steelyard.experiment.report import write_report
from steelyard.experiment.report.ablation_table import Cell, ablation_table
from steelyard.experiment.report.load import Experiment, LoadedRun
from tests.experiment.folders import write_ablation, write_lines

from .parsed_page import page_charts, text_of, trace_points


def test_report_shows_the_effect_of_leaving_out_each_term(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms")
    page = write_report([tmp_path / "terms"], tmp_path / "report.html")
    assert list(trace_points(page_charts(page)["held_out"])) == list(rows)
    text = text_of(page)
    assert "Ablation: terms" in text
    assert "Effect of leaving out each term" in text
    full = rows["all"][-1]["held_out/loss"]
    other = rows["without confidence"][-1]["held_out/loss"]
    assert f"without confidence {other:.3f} −{full - other:.3f}" in text
    assert "regularizers.confidence enabled – enabled – enabled enabled" in text


def test_terms_are_compared_on_held_out_data_where_measured(tmp_path: Path) -> None:
    rows = write_ablation(tmp_path / "terms")
    for name, value in (("all", 0.125), ("without judge", 0.625)):
        own = rows[name]
        own[-1]["held_out/regularizers/judge"] = value
        write_lines(tmp_path / "terms" / name.replace(" ", "-") / "metrics.jsonl", own)
    text = text_of(write_report([tmp_path / "terms"], tmp_path / "report.html"))
    assert "0.625 +0.500" in text


def ablated_run(name: str, losses: Sequence[float], **last: float) -> LoadedRun:
    """A run with these base losses; `last` goes into the metrics of its last step."""
    rows = [
        {"step": step, "base_loss/value": loss, "regularizers/kl/value": 10 * loss,
         "regularizers/kl/contribution": loss, "seconds": loss / 8}
        for step, loss in enumerate(losses)
    ]  # fmt: skip
    rows[-1] |= {key.replace("__", "/"): value for key, value in last.items()}
    return LoadedRun(name, Path(), {}, rows)


def test_without_held_out_data_means_over_the_last_quarter_are_compared() -> None:
    runs = [
        ablated_run("without kl", [9.0, 8.0, 7.0, 6.0]),
        ablated_run("all", [9.0, 9.0, 8.0, 8.0, 7.0, 7.0, 4.0, 2.0]),
    ]
    table = ablation_table(Experiment(runs, full="all"))
    assert table is not None
    assert table.columns == ["training loss", "kl", "seconds per step"]
    assert table.rows == [
        ("all", [Cell(3.0), Cell(30.0), Cell(0.375)]),
        ("without kl", [Cell(6.0, 3.0), Cell(60.0, 30.0), Cell(0.75, 0.375)]),
    ]


def test_held_out_values_are_the_last_ones() -> None:
    runs = [
        ablated_run("all", [9.0, 1.0], held_out__loss=4.0, held_out__regularizers__kl=0.5),
        ablated_run("none", [9.0, 1.0], held_out__loss=3.0),
    ]
    table = ablation_table(Experiment(runs, full="all"))
    assert table is not None
    assert table.columns == ["held-out loss", "kl", "seconds per step"]
    assert table.rows == [
        ("all", [Cell(4.0), Cell(0.5), Cell(0.125)]),
        ("none", [Cell(3.0, -1.0), Cell(None), Cell(0.125, 0.0)]),
    ]


def test_there_is_no_table_without_the_run_with_all_terms() -> None:
    assert ablation_table(Experiment([ablated_run("none", [1.0])])) is None
