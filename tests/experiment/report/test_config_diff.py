"""Settings as text, and the settings in which runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment.report import write_report
from steelyard.experiment.report.config_diff import (
    config_differences,
    format_setting,
    top_level_settings,
)
from steelyard.experiment.report.load import LoadedRun
from tests.experiment.folders import write_run

from .parsed_page import text_of


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"regularizers": [{"use": "evenness"}, {}, 3], "model": None, "train": {"steps": "x"}},
        {"regularizers": "none", "more": [1, None], "train": None},
    ],
)
def test_report_accepts_an_unknown_config(tmp_path: Path, config: Any) -> None:
    write_run(tmp_path / "run", steps=2)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    page = write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "Config" in text_of(page)
    write_report([tmp_path / "run", tmp_path / "run"], tmp_path / "report.html")


def test_settings_as_text() -> None:
    values = ["kl", 0.1, True, None, {"tune": [0, 1]}, "é", ["é"]]
    assert [format_setting(value) for value in values] == [
        "kl",
        "0.1",
        "true",
        "null",
        '{"tune": [0, 1]}',
        "é",
        '["é"]',
    ]


def test_top_level_settings_are_in_no_table() -> None:
    config = {"imports": ["m"], "train": {"steps": 1}, "regularizers": [{"use": "l1"}], "seed": 3}
    assert top_level_settings(config) == {"imports": ["m"], "seed": 3}


def test_differences_have_one_value_per_run() -> None:
    configs: list[dict[str, Any]] = [
        {
            "train": {"steps": 4, "seed": 0},
            "regularizers": [
                {"use": "l1", "name": "sparse", "weight": 0.1},
                {"use": "l2", "weight": 1.0},
                {"use": "entropy", "enabled": False},
            ],
        },
        {
            "train": {"steps": 6, "seed": 0, "tags": {}},
            "regularizers": [{"use": "l1", "name": "sparse", "weight": 0.2}, {"use": "entropy"}],
        },
    ]
    runs = [LoadedRun(str(i), Path(), config, []) for i, config in enumerate(configs)]
    assert config_differences(runs) == {
        "train.steps": ["4", "6"],
        "train.tags": ["–", "{}"],
        "regularizers.sparse.weight": ["0.1", "0.2"],
        "regularizers.l2": ["enabled", "–"],
        "regularizers.entropy": ["–", "enabled"],
    }
    assert config_differences(runs[:1]) == {}


def test_rewards_are_compared_by_name() -> None:
    def run(name: str, *rewards: dict[str, Any]) -> LoadedRun:
        return LoadedRun(name, Path(), {"data": None, "rewards": list(rewards)}, [])

    short = {"use": "length", "name": "short", "weight": 1.0}
    kind = {"use": "judge", "weight": 0.5, "enabled": True}
    runs = [
        run("all", short, kind),
        run("other", {**short, "weight": 2.0}, {**kind, "enabled": False}),
    ]
    assert config_differences(runs) == {
        "rewards.short.weight": ["1.0", "2.0"],
        "rewards.judge": ["enabled", "–"],
    }
    assert top_level_settings(runs[0].config) == {}
