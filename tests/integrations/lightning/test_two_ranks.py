"""Two processes with strategy "ddp", compared with the same in one process by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.lightning.models import Net, cross_entropy, net, read
from tests.integrations.lightning.two_ranks import DATA, HELD_OUT, activity

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records that each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.lightning.two_ranks", folder],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


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
def test_training_equals_the_same_by_hand(ranks: list[dict[str, Any]], how: str) -> None:
    _, expected = by_hand(unreliable=how == "mixin")
    for rank in ranks:
        assert rank[how]["parameters"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("how", ["mixin", "callback"])
def test_every_rank_logs_the_mean_of_all(ranks: list[dict[str, Any]], how: str) -> None:
    steps, _ = by_hand(unreliable=how == "mixin")
    for rank in ranks:
        for row, (mine, yours) in zip(rank[how]["rows"], steps, strict=True):
            total = (sum(mine.values()) + sum(yours.values())) / 2
            assert row["train/loss_total"] == pytest.approx(total, rel=1e-5)
            for name in mine.keys() - {"base"}:
                mean = (mine[name] + yours.get(name, 0.0)) / 2
                logged = row[f"train/regularizers/{name}/contribution"]
                assert logged == pytest.approx(mean, rel=1e-5)


def test_without_sync_dist_each_rank_logs_its_own(ranks: list[dict[str, Any]]) -> None:
    steps, _ = by_hand(unreliable=False)
    for rank, each in enumerate(ranks):
        totals = [row["train/loss_total"] for row in each["without sync"]["rows"]]
        own = [sum(pair[rank].values()) for pair in steps]
        assert totals == pytest.approx(own, rel=1e-5)


def test_a_term_that_one_rank_skipped_has_the_value_of_the_other(
    ranks: list[dict[str, Any]],
) -> None:
    steps, _ = by_hand(unreliable=True)
    value = steps[1][0]["unreliable"] / 0.3
    for rank in ranks:
        row = rank["mixin"]["rows"][1]
        assert row["train/regularizers/unreliable/value"] == pytest.approx(value, rel=1e-5)


def test_the_fraction_of_ranks_that_skipped_a_term_is_logged(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert [row["train/skipped/unreliable"] for row in rank["mixin"]["rows"]] == [0.0, 0.5, 0.0]
        assert not [key for row in rank["callback"]["rows"] for key in row if "skipped" in key]


def test_the_mean_of_an_epoch_weighs_batches_by_their_size(ranks: list[dict[str, Any]]) -> None:
    model = net()
    every = [batch for rank in HELD_OUT for batch in rank]
    sizes = [len(x) for x, _ in every]
    values = [parts(model, batch, unreliable=False)["base"].item() for batch in every]
    mean = sum(size * value for size, value in zip(sizes, values, strict=True)) / sum(sizes)
    for rank in ranks:
        logged = rank["test"]["rows"][-1]["test/base_loss/value"]
        assert logged == pytest.approx(mean, rel=1e-5)
