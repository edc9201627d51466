"""Prompts and data from reasoning-gym and from Hugging Face datasets, and runs with them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pytest

from steelyard.errors import ConfigError, DataError, MissingExtraError
from steelyard.experiment import Config, RunFolder, read_config, train
from steelyard.experiment.config.data_tables import SourceConfig, sources_of
from steelyard.experiment.data.batches import batch, mixed_batch
from steelyard.experiment.data.record_sources import (
    digest_of_lines,
    import_reasoning_gym,
    lines_of,
    score_task,
)
from steelyard.experiment.rewards.judges import TaskScore
from steelyard.experiment.training.loop import check_start
from steelyard.experiment.training.terms import build_terms
from tests.experiment.small_runs import prompts, write_data

SMALL: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SUMS: dict[str, Any] = {"use": "reasoning_gym:chain_sum", "size": 8, "seed": 1, "options": SMALL}


def records(seed: int = 0, **source: Any) -> list[dict[str, Any]]:
    found = lines_of(SourceConfig(**source), "answer", seed)
    return [json.loads(line) for _, line in found.read()]


def rollouts(folder: Path, given: Any, **more: Any) -> Config:
    raw = {
        "model": {"base_model": "tiny-random", "rank": 2, "device": "cpu"},
        "rollouts": {
            "prompts": given,
            "per_step": 2,
            "group_size": 2,
            "max_tokens": 4,
            "held_out": 0.2,
        },
        "train": {"steps": 1},
        **more,
    }
    return read_config(raw, folder=folder)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rows = [{"question": f"{n} + 1 =", "target": str(n + 1), "level": n} for n in range(6)]
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return folder


def test_tasks_are_records_with_their_answers() -> None:
    first = records(**SUMS)
    assert len(first) == 8
    for record in first:
        a, sign, b = record["metadata"]["expression"].split()
        assert record["prompt"].endswith(f"{a} {sign} {b} =")
        assert record["answer"] == str(int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert record["task"] == "chain_sum"
        assert score_task(record, record["answer"]) == 1
        assert score_task(record, "none") == 0
    assert records(**SUMS) == first
    assert records(**{**SUMS, "seed": 2}) != first


def test_a_source_without_a_seed_has_that_of_the_run() -> None:
    source = {key: value for key, value in SUMS.items() if key != "seed"}
    assert records(seed=1, **source) == records(**SUMS)
    assert len(records(use="reasoning_gym:leg_counting")) == 500


def test_the_score_is_that_of_the_task_without_white_space() -> None:
    (record, *_) = records(**SUMS)
    assert TaskScore()(record, f" {record['answer']}\n") == 1.0
    assert 0 < TaskScore()(record, f"It is {record['answer']}") < 1


def test_most_tasks_work_offline() -> None:
    """All but those that need a package without wheels, and a few with other scorers."""
    names = sorted(importlib.import_module("reasoning_gym.factory").DATASETS)
    assert len(names) > 100
    solved, missing = 0, []
    for name in names:
        try:
            record = records(use=f"reasoning_gym:{name}", size=1, seed=1)[0]
        except MissingExtraError as error:
            missing.append(str(error))
        except ConfigError:
            assert name == "composite"  # it needs other tasks as options
        else:
            solved += score_task(record, record["answer"]) == 1
    assert solved >= 90
    assert len(missing) <= 8
    assert all("steelyard[tasks]" in message for message in missing)


def test_missing_packages_stay_missing_for_others() -> None:
    gym = import_reasoning_gym()
    assert import_reasoning_gym() is gym
    code = (
        "from steelyard.experiment.data.record_sources import import_reasoning_gym\n"
        "import importlib.util, sys\n"
        "absent = {n for n in ('zss', 'pycosat') if importlib.util.find_spec(n) is None}\n"
        "import_reasoning_gym()\n"
        "assert not absent & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"use": "reasoning_gym:chain_sun"}, "names none; did you mean 'chain_sum'?"),
        ({**SUMS, "options": {"min_trms": 2}}, "options of reasoning_gym:chain_sum must be valid:"),
        ({**SUMS, "options": {"min_terms": -2}}, "min_terms must be positive"),
    ],
)
def test_tasks_and_options_that_there_are_not(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        records(**source)
    assert message in str(caught.value)


def test_a_dataset_from_a_folder(saved: Path) -> None:
    found = records(use=f"datasets:{saved}", prompt="question", answer="target", size=4)
    assert found[0] == {"prompt": "0 + 1 =", "answer": "1", "level": 0}
    assert len(found) == 4
    source = SourceConfig(use=f"datasets:{saved}", prompt="question", answer="target")
    completed = [json.loads(line) for _, line in lines_of(source, "completion", 0).read()]
    assert completed[5]["completion"] == "6"
    splits = datasets.DatasetDict({"test": datasets.load_from_disk(str(saved))})
    splits.save_to_disk(str(saved.parent / "splits"))
    assert len(records(use=f"datasets:{saved.parent / 'splits'}", split="test")) == 6


def test_a_named_column_takes_the_place_of_one_with_the_name_of_its_field(tmp_path: Path) -> None:
    """Datasets of mathematics have a solution, which is named here, and then an answer."""
    rows = {"problem": ["1 + 1 ="], "solution": ["1 + 1 = 2"], "answer": ["2"], "prompt": ["Add."]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "sums"))
    found = records(use=f"datasets:{tmp_path / 'sums'}", prompt="problem", answer="solution")
    assert found == [{"prompt": "1 + 1 =", "answer": "1 + 1 = 2"}]
    assert records(use=f"datasets:{tmp_path / 'sums'}")[0]["answer"] == "2"


def test_a_folder_of_files_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_data(tmp_path / "files" / "train.jsonl", prompts(3))
    assert records(use=f"datasets:{tmp_path / 'files'}") == prompts(3)


def test_columns_and_splits_that_there_are_not(saved: Path) -> None:
    with pytest.raises(DataError, match="must have the column 'questin', which prompt names"):
        records(use=f"datasets:{saved}", prompt="questin")
    (saved.parent / "files").mkdir()
    write_data(saved.parent / "files" / "train.jsonl", prompts(3))
    with pytest.raises(DataError, match="with the split 'nothing', and it cannot be loaded"):
        records(use=f"datasets:{saved.parent / 'files'}", split="nothing")


def test_a_dataset_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="Without a connection name a local folder"):
        records(use="datasets:nobody/has-this-one")


def test_a_run_on_tasks_needs_no_file_and_no_reward(tmp_path: Path) -> None:
    config = rollouts(tmp_path, SUMS)
    assert [(entry.use, entry.name) for entry in config.rewards] == [("reasoning_gym", "score")]
    train(config, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    assert "rewards/score/mean" in run.metrics()[0]
    held = json.loads((tmp_path / "run" / "data.json").read_text("utf-8"))
    source = SourceConfig(**SUMS)
    assert held == {"reasoning_gym:chain_sum": digest_of_lines(lines_of(source, "answer", 0))}
    assert run.config().rollouts == config.rollouts


def test_several_sources_have_their_own_rewards(tmp_path: Path) -> None:
    write_data(tmp_path / "prompts.jsonl", [{**line, "answer": "1"} for line in prompts(5)])
    given = [SUMS, {"use": "prompts.jsonl", "weight": 0.5}]
    with pytest.raises(ConfigError, match="at least one enabled entry in"):
        rollouts(tmp_path, given)
    config = rollouts(tmp_path, given, rewards=[{"use": "exact_match"}])
    assert config.rollouts is not None
    sources = sources_of(config.rollouts.prompts)
    assert sources[1].use == str(tmp_path / "prompts.jsonl")
    train(config, tmp_path / "run")
    held = json.loads((tmp_path / "run" / "data.json").read_text("utf-8"))
    assert held.keys() == {"reasoning_gym:chain_sum", str(tmp_path / "prompts.jsonl")}


def test_tasks_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    config = rollouts(tmp_path, {"use": "reasoning_gym:chain_sun"})
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        check_start(config, build_terms(config))
    (line,) = prompts(1)
    write_data(tmp_path / "prompts.jsonl", [line])
    config = rollouts(tmp_path, "prompts.jsonl", rewards=[{"use": "reasoning_gym"}])
    with pytest.raises(DataError, match="must have the field 'answer' for reward 'reasoning_gym'"):
        check_start(config, build_terms(config))


def test_training_data_from_a_dataset(saved: Path) -> None:
    raw = {
        "model": {"base_model": "tiny-random", "rank": 2, "device": "cpu"},
        "data": {"path": {"use": "datasets:saved", "prompt": "question", "answer": "target"}},
        "train": {"steps": 1, "batch_size": 2},
    }
    config = read_config(raw, folder=saved.parent)
    train(config, saved.parent / "run")
    held = json.loads((saved.parent / "run" / "data.json").read_text("utf-8"))
    assert list(held) == [f"datasets:{saved}"]
    raw["data"] = {"path": SUMS}
    config = read_config(raw, folder=saved.parent)
    with pytest.raises(ConfigError, match="tasks are prompts of"):
        check_start(config, build_terms(config))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**SUMS, "split": "x"}, "prompts must have no key split for the source"),
        ({**SUMS, "siz": 2}, "prompts.siz is not a key; did you mean size? Known: use, size, seed"),
        ({"use": "datasets:./nowhere"}, "prompts must name a folder that exists, got"),
        ({"use": "nothing.jsonl"}, "prompts must be a file that exists, got"),
        ([], "prompts must be a list with at least one entry, got []"),
        ([{**SUMS, "weight": 0}], "prompts.0.weight must be > 0, got 0"),
        ("", "prompts must be a non-empty string, got ''"),
    ],
)
def test_sources_that_break_a_rule(given: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rollouts(tmp_path, given, rewards=[{"use": "exact_match"}])
    assert message in str(caught.value)


def test_a_mixture_follows_the_weights_and_goes_through_each_source() -> None:
    sources = [0] * 5 + [1] * 10
    drawn = [i for step in range(100) for i in mixed_batch(step, 4, sources, [3.0, 1.0], 7)]
    assert 260 < sum(index < 5 for index in drawn) < 340
    counts = Counter(index for index in drawn if index >= 5)
    assert len(counts) == 10
    assert max(counts.values()) - min(counts.values()) <= 1
    # One source is as without weights, and a source without items is left out.
    assert mixed_batch(3, 4, [0] * 9, [1.0], 7) == batch(3, 4, 9, 7)
    assert mixed_batch(3, 4, [1] * 9, [5.0, 1.0], 7) == batch(3, 4, 9, 7)
