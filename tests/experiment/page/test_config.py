"""Settings as text, and the settings in which runs differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment.config.schema import Config
from steelyard.experiment.page.frozen import write_report
from steelyard.experiment.page.load import LoadedRun
from steelyard.experiment.page.records import config as config_record
from steelyard.experiment.page.records import config_differences, format_setting
from tests.experiment.folders import write_run

from .frozen_page import document_of


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
    assert "sections" in document_of(page)["records"]["config"]
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


def test_settings_are_shown_by_table_and_what_differs_from_the_defaults_first(
    tmp_path: Path,
) -> None:
    settings = Config.model_validate(
        {
            "imports": ["m"],
            "python_path": ["/here/configs"],
            "data": {"path": "/here/configs/d.jsonl"},
            "train": {"steps": 7},
            "regularizers": [{"use": "l1", "weight": 0.25}],
        }
    ).model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps(settings | {"unknown": 3}))
    shown = config_record(tmp_path)
    different = {row["key"]: (row["value"], row["default"]) for row in shown["different"]}
    assert different == {
        "imports": ('["m"]', "[]"),
        "data.path": ("d.jsonl", "–"),
        "train.steps": ("7", "20"),
        "l1.use": ("l1", "–"),
        "l1.weight": ("0.25", "–"),
        "unknown": ("3", "–"),
    }
    titles = {section["title"]: section["color"] for section in shown["sections"]}
    assert titles["l1"] == 0
    assert titles["train"] is None
    whole = {section["title"]: dict(section["settings"]) for section in shown["sections"]}
    assert whole["train"]["steps"] == "7"
    assert whole["top level"]["unknown"] == "3"


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
