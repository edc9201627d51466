"""The dataset of a run: its split, its reference log-probs and its prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.errors import DataError, RunError
from steelyard.experiment import Config, RunFolder
from steelyard.experiment.config.train_table import TrainConfig
from steelyard.experiment.data.batches import Dataset, batch, load_dataset, used_lines
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.training.terms import build_terms
from tests.experiment.small_runs import DRIFT, KL, L2, lines, small_config, write_data


def load(config: Config, backend: Backend, run: RunFolder, messages: list[str]) -> Dataset:
    return load_dataset(config, build_terms(config), backend, run, messages.append)


def prompts(dataset: Dataset) -> list[str]:
    return [group[0].record["prompt"] for group in dataset.train]  # type: ignore[attr-defined]


def test_a_fraction_of_the_lines_is_held_out(
    folder: Path, backend: Backend, run: RunFolder
) -> None:
    messages: list[str] = []
    dataset = load(small_config(folder), backend, run, messages)
    assert (len(dataset.train), len(dataset.held_out), dataset.kind) == (10, 2, "completion")
    held_out = [datum.record["prompt"] for datum in dataset.held_out]  # type: ignore[attr-defined]
    assert sorted(prompts(dataset) + held_out) == sorted(line["prompt"] for line in lines(12))
    assert messages == ["10 lines to train on, 2 held out"]
    in_file = [line["prompt"] for line in lines(12)]
    assert prompts(dataset) == [in_file[number - 1] for number in dataset.lines]
    assert dataset.file == "train.jsonl"
    assert "reference_logprobs" not in dataset.held_out[0].loss_fn_inputs


def test_a_separate_file_is_held_out(folder: Path, backend: Backend, run: RunFolder) -> None:
    write_data(folder / "held.jsonl", lines(3))
    dataset = load(small_config(folder, "data.held_out=held.jsonl"), backend, run, [])
    assert (len(dataset.train), len(dataset.held_out)) == (12, 3)
    assert dataset.lines == list(range(1, 13))
    write_data(folder / "held.jsonl", lines(4))
    with pytest.raises(RunError, match=r"held\.jsonl must be as it was when the run began"):
        load(small_config(folder, "data.held_out=held.jsonl"), backend, run, [])


def test_held_out_data_must_have_the_format_of_the_training_data(
    folder: Path, backend: Backend, run: RunFolder
) -> None:
    write_data(folder / "held.jsonl", [{"chosen": "a", "rejected": "b"}])
    with pytest.raises(
        DataError, match=r"held\.jsonl must be of one kind with .*, completion, got"
    ):
        load(small_config(folder, "data.held_out=held.jsonl"), backend, run, [])


@pytest.mark.parametrize(
    ("entry", "reference", "computed"),
    [
        (KL, "auto", True),
        (L2, "auto", False),
        (L2, "always", True),
        ({**KL, "on_error": "skip"}, "never", False),
    ],
)
def test_reference_logprobs_are_added_to_the_lines_that_are_used(
    folder: Path, backend: Backend, run: RunFolder, entry: Any, reference: str, computed: bool
) -> None:
    config = small_config(folder, f"data.reference={reference}", regularizers=[entry])
    dataset = load(config, backend, run, [])
    having = {
        index
        for index, group in enumerate(dataset.train)
        if "reference_logprobs" in group[0].loss_fn_inputs
    }
    used = {index for step in range(3) for index in batch(step, size=2, count=10, seed=0)}
    assert having == (used if computed else set())
    for datum in dataset.held_out:
        assert ("reference_logprobs" in datum.loss_fn_inputs) == computed


@pytest.mark.parametrize("entry", [KL, DRIFT], ids=["everywhere", "where it is measured"])
def test_lines_stay_where_they_are_and_get_their_own_reference(
    folder: Path, backend: Backend, run: RunFolder, entry: Any
) -> None:
    plain = load(small_config(folder, "data.reference=never"), backend, run, [])
    dataset = load(small_config(folder, regularizers=[entry]), backend, run, [])
    assert prompts(dataset) == prompts(plain)
    for datum, original in zip(dataset.held_out, plain.held_out, strict=True):
        assert datum.model_input == original.model_input
    data = [group[0] for group in dataset.train] + list(dataset.held_out)
    referenced = [datum for datum in data if "reference_logprobs" in datum.loss_fn_inputs]
    assert len(referenced) == (6 + 2 if entry is KL else 2)
    for datum, row in zip(referenced, backend.logprobs(referenced), strict=True):
        found = datum.loss_fn_inputs["reference_logprobs"].to_torch()
        torch.testing.assert_close(found, row)


@pytest.mark.parametrize(
    ("steps", "size", "count"), [(3, 2, 10), (4, 3, 10), (99, 4, 10), (1, 9, 4)]
)
def test_used_lines_are_those_of_all_batches(steps: int, size: int, count: int) -> None:
    expected = {index for step in range(steps) for index in batch(step, size, count, seed=5)}
    config = TrainConfig(steps=steps, batch_size=size, seed=5)
    assert used_lines(config, count) == sorted(expected)


def test_skipped_lines_are_reported(folder: Path, backend: Backend, run: RunFolder) -> None:
    config = small_config(folder, "data.skip_bad=true")
    path = write_data(folder / "train.jsonl", [*lines(4), {"prompt": "a"}, {"b": 1}])
    messages: list[str] = []
    dataset = load(config, backend, run, messages)
    assert len(dataset.train) + len(dataset.held_out) == 4
    assert messages[0].startswith(f"2 bad lines left out, the first: {path}:5: must have the keys")


def test_prompts_have_the_format_of_the_data(
    folder: Path, backend: Backend, run: RunFolder
) -> None:
    dataset = load(small_config(folder), backend, run, [])
    assert dataset.prompt("ab").to_ints() == backend.tokenizer.encode("ab")
