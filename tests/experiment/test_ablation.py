"""Ablations: variants of a config, their runs, and the table that compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.errors import RunError
from steelyard.experiment import Config, RunFolder, ablate
from steelyard.experiment.ablation import variants

from .small_runs import DRIFT, L2, Recorder, noise, small_config, term


def enabled(config: Config) -> list[bool]:
    return [entry.enabled for entry in config.regularizers]


def test_variants_leave_out_each_enabled_term_and_all(folder: Path) -> None:
    entries = [L2, {**term(noise), "enabled": False}, DRIFT]
    config = small_config(folder, regularizers=entries)
    assert {label: enabled(variant) for label, variant in variants(config).items()} == {
        "all": [True, False, True],
        "without l2": [False, False, True],
        "without drift": [True, False, False],
        "none": [False, False, False],
    }


def test_variants_of_one_term_and_of_none(folder: Path) -> None:
    assert list(variants(small_config(folder))) == ["all", "none"]
    assert list(variants(small_config(folder, regularizers=[]))) == ["all"]


def test_the_table_holds_the_results_of_all_runs(folder: Path) -> None:
    config = small_config(folder, "train.steps=2")
    ablation = ablate(config, folder / "a")
    assert ablation.done
    assert ablation.runs == {"all": "all", "none": "none"}
    for row, label in zip(ablation.table, ("all", "none"), strict=True):
        result = RunFolder(folder / "a" / label).result()
        assert result is not None
        metrics = result["metrics"]
        assert row == {
            "run": label,
            "held_out/loss": metrics["held_out/loss"],
            "loss": metrics["base_loss/value"],
            "terms": {"l2": metrics["held_out/regularizers/l2"]},
            "seconds": result["seconds"],
        }
    assert ablation.table[0]["held_out/loss"] != ablation.table[1]["held_out/loss"]
    written = json.loads((folder / "a" / "ablation.json").read_text())
    assert written == {"runs": ablation.runs, "table": ablation.table}


def test_an_interrupted_ablation_continues_with_unfinished_runs(folder: Path) -> None:
    config = small_config(folder, "train.steps=2")
    answers = iter([False, False, False, False, True])  # before each run and each step
    first = ablate(config, folder / "a", stop=lambda: next(answers, True))
    assert not first.done
    assert [row["run"] for row in first.table] == ["all"]
    recorder = Recorder()
    second = ablate(config, folder / "a", watch=recorder)
    assert second.done
    assert [text for text in recorder.messages if text.startswith("run ")] == ["run none"]
    assert [metrics["step"] for metrics in recorder.steps] == [0, 1]


def test_a_folder_of_another_config_is_refused(folder: Path) -> None:
    ablate(small_config(folder, "train.steps=1"), folder / "a", stop=lambda: True)
    RunFolder(folder / "a" / "all").begin(small_config(folder, "train.steps=1"))
    with pytest.raises(RunError, match=r"must be new or hold runs of this config, and .*a/all is"):
        ablate(small_config(folder, "train.steps=2"), folder / "a")


def test_labels_become_folder_names(folder: Path) -> None:
    config = small_config(folder, regularizers=[{**L2, "name": "l2 / all"}, DRIFT])
    ablation = ablate(config, folder / "a", stop=lambda: True)
    assert ablation.runs["without l2 / all"] == "without-l2-all"
    assert (ablation.table, ablation.done) == ([], False)
