"""Batches of lines: their order, where they come from, and the evaluation on held-out lines."""

from __future__ import annotations

from pathlib import Path

from steelyard.experiment.backend import Backend
from steelyard.experiment.batching import batch
from steelyard.experiment.build_terms import build_terms
from steelyard.experiment.dataset import load_dataset
from steelyard.experiment.fixed_data import FixedData
from steelyard.experiment.run_dir import RunFolder

from .small_runs import small_config


def test_a_step_has_one_batch_of_its_lines(tmp_path: Path, backend: Backend) -> None:
    config = small_config(tmp_path)
    terms, run = build_terms(config), RunFolder(tmp_path / "run")
    with run.locked():
        run.begin(config)
        dataset = load_dataset(config, terms, backend, run, lambda _: None)
    source = FixedData(dataset, config.train, terms, backend)
    found = source.step_data(1)
    assert found.metrics == {}
    (one,) = found.batches
    indices = batch(1, 2, len(dataset.train), config.train.seed)
    assert one.data == [dataset.train[index][0] for index in indices]
    assert one.origins == [(dataset.lines[index], "") for index in indices]
    assert one.file == "train.jsonl"
    assert set(source.evaluate(1)) == {"held_out/loss", "held_out/regularizers/l2"}
    assert source.prompt("a").to_ints() == dataset.prompt("a").to_ints()
