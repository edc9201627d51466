"""Lightning in two real processes, with DDP and FSDP2, against one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.process_group import run_group
from tests.whole_batch import assert_same

from .models import Net, cross_entropy, net, read
from .rank_training import TRACKED, WAYS, everything, train
from .uneven_ranks import DATA, HELD_OUT, activity

Found = list[dict[Any, Any]]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    return run_group(everything, folder, folder)


@pytest.fixture(scope="module")
def whole() -> dict[Any, Any]:
    return {(n, called): train("alone", n, called=called) for _, n, called in WAYS[:4]}


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("loss_total", "value", "weight", "contribution")
    return {name: value for name, value in row.items() if name.endswith(kept)}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_equals_one_process_on_the_whole_batch(
    group: Found, whole: dict[Any, Any], way: tuple[str, int, bool]
) -> None:
    expected = whole[way[1:]]
    for rank in group:
        found = rank[way]
        assert found["sharded"] == (way[0] == "fsdp")
        for mine, other in zip(found["gradients"], expected["gradients"], strict=True):
            assert_same(mine, other)
        assert_same(found["parameters"], expected["parameters"])
        for mine, other in zip(found["rows"], expected["rows"], strict=True):
            assert numbers(mine) == pytest.approx(numbers(other), rel=1e-6, abs=1e-6)
        for name, each in expected["output"]["regularizers"].items():
            mine = found["output"]["regularizers"][name]
            for key in ("value", "weight", "contribution"):
                assert mine[key] == pytest.approx(each[key], rel=1e-6, abs=1e-6)
        assert found["state"] == group[0][way]["state"]
    assert expected["rows"][0]["train/regularizers/size/weight"] > 0


@pytest.mark.parametrize("way", TRACKED, ids=str)
def test_norms_are_those_of_the_whole_batch(group: Found, way: tuple[str, bool]) -> None:
    expected = train("alone", tracked=True, called=way[1])
    for rank in group:
        for mine, other in zip(rank["tracked", *way]["rows"], expected["rows"], strict=True):
            for name in other:
                if "grad_norm" in name or "cosines" in name:
                    assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name
    assert "train/regularizers/size/grad_norm" in expected["rows"][0]


def test_activation_checkpointing_changes_nothing(group: Found) -> None:
    for rank in group:
        for mine, other in zip(
            rank["checkpointed"]["gradients"], rank["fsdp", 1, False]["gradients"], strict=True
        ):
            assert_same(mine, other)


def test_bfloat16_is_close(group: Found, whole: dict[Any, Any]) -> None:
    for rank in group:
        pairs = zip(rank["bf16"]["rows"], whole[1, False]["rows"], strict=True)
        for mine, other in pairs:
            assert numbers(mine) == pytest.approx(numbers(other), rel=5e-2, abs=5e-2)


@pytest.mark.parametrize("called", [False, True])
def test_a_run_resumed_from_shards_equals_an_uninterrupted_one(group: Found, called: bool) -> None:
    for rank in group:
        straight, resumed = rank["straight", called], rank["resumed", called]
        assert_same(resumed["parameters"], straight["parameters"])
        assert resumed["state"] == straight["state"]
        assert [numbers(row) for row in resumed["rows"]] == [
            numbers(row) for row in straight["rows"][2:]
        ]


# Batches of other sizes in each process, and a term that fails in one of them.


@pytest.fixture(scope="module")
def uneven(group: Found) -> Found:
    return [rank["uneven"] for rank in group]


def parts(model: Net, batch: Any, *, unreliable: bool) -> dict[str, Tensor]:
    found = read(model, *batch)
    return {
        "base": cross_entropy(found["logits"], found["labels"]),
        "activity": 0.5 * activity(found["hidden"]),
        "router": 0.2 * found["router"],
        **({"unreliable": 0.3 * found["hidden"].abs().mean()} if unreliable else {}),
    }


def by_hand(*, unreliable: bool) -> tuple[list[list[dict[str, float]]], list[float]]:
    """The parts of the loss by step and rank, and the parameters at the end."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    steps = []
    for step, pair in enumerate(zip(*DATA, strict=True)):
        found = [
            parts(model, batch, unreliable=unreliable and (rank, step) != (1, 1))
            for rank, batch in enumerate(pair)
        ]
        total = torch.stack([torch.stack(list(each.values())).sum() for each in found]).mean()
        total.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        optimizer.step()
        optimizer.zero_grad()
        steps.append([{name: v.item() for name, v in each.items()} for each in found])
    return steps, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize("how", ["mixin", "callback"])
def test_uneven_batches_train_as_by_hand(uneven: Found, how: str) -> None:
    _, expected = by_hand(unreliable=how == "mixin")
    for rank in uneven:
        assert rank[how]["parameters"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("how", ["mixin", "callback"])
def test_every_rank_logs_the_mean_of_all(uneven: Found, how: str) -> None:
    steps, _ = by_hand(unreliable=how == "mixin")
    for rank in uneven:
        for row, (mine, yours) in zip(rank[how]["rows"], steps, strict=True):
            total = (sum(mine.values()) + sum(yours.values())) / 2
            assert row["train/loss_total"] == pytest.approx(total, rel=1e-5)
            for name in mine.keys() - {"base"}:
                mean = (mine[name] + yours.get(name, 0.0)) / 2
                logged = row[f"train/regularizers/{name}/contribution"]
                assert logged == pytest.approx(mean, rel=1e-5)


def test_without_sync_dist_each_rank_logs_its_own(uneven: Found) -> None:
    steps, _ = by_hand(unreliable=False)
    for rank, each in enumerate(uneven):
        totals = [row["train/loss_total"] for row in each["without sync"]["rows"]]
        own = [sum(pair[rank].values()) for pair in steps]
        assert totals == pytest.approx(own, rel=1e-5)


def test_a_term_that_one_rank_skipped_has_the_value_of_the_other(uneven: Found) -> None:
    steps, _ = by_hand(unreliable=True)
    value = steps[1][0]["unreliable"] / 0.3
    for rank in uneven:
        row = rank["mixin"]["rows"][1]
        assert row["train/regularizers/unreliable/value"] == pytest.approx(value, rel=1e-5)


def test_the_fraction_of_ranks_that_skipped_a_term_is_logged(uneven: Found) -> None:
    for rank in uneven:
        assert [row["train/skipped/unreliable"] for row in rank["mixin"]["rows"]] == [0.0, 0.5, 0.0]
        assert not [key for row in rank["callback"]["rows"] for key in row if "skipped" in key]


def test_the_mean_of_an_epoch_weighs_batches_by_their_size(uneven: Found) -> None:
    model = net()
    every = [batch for rank in HELD_OUT for batch in rank]
    sizes = [len(x) for x, _ in every]
    values = [parts(model, batch, unreliable=False)["base"].item() for batch in every]
    mean = sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)
    for rank in uneven:
        logged = rank["test"]["rows"][-1]["test/base_loss/value"]
        assert logged == pytest.approx(mean, rel=1e-5)
