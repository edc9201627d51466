"""Batches and the held-out split."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from steelyard.experiment.data.batches import FixedData, batch, load_dataset, split
from steelyard.experiment.model.backend import Backend
from steelyard.experiment.run.folder import RunFolder
from steelyard.experiment.training.terms import build_terms
from tests.experiment.small_runs import small_config


@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 5))
def test_every_line_is_used_once_in_each_epoch(size: int, count: int, seed: int) -> None:
    seen = [index for step in range(2 * count) for index in batch(step, size, count, seed)]
    for epoch in range(len(seen) // count):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


@given(st.integers(1, 40), st.floats(0, 0.99), st.integers(0, 5))
def test_a_split_keeps_every_item(count: int, fraction: float, seed: int) -> None:
    items = list(range(count))
    train, held = split(items, fraction, seed)
    assert sorted(train + held) == items
    assert train
    assert bool(held) == (fraction > 0 and count > 1)
    assert (train, held) == split(items, fraction, seed)


def test_epochs_have_different_orders_and_a_batch_may_span_two() -> None:
    first, second, third = (batch(step, size=6, count=9, seed=1) for step in range(3))
    epochs = [first + second[:3], second[3:] + third]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(9))
    assert batch(0, size=9, count=9, seed=2) != epochs[0], "another seed, another order"


def test_the_size_of_the_held_out_part() -> None:
    items = list(range(20))
    assert [len(split(items, fraction, 0)[1]) for fraction in (0.01, 0.25, 0.99)] == [1, 5, 19]
    train, held_out = split(items, 0.25, 0)
    assert (train, held_out) == (sorted(train), sorted(held_out)), "in the given order"
    assert split(items, 0.25, 1)[1] != held_out


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
