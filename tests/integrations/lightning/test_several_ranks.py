"""Lightning in two real processes, with DDP and FSDP2, against one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process_group import run_group
from tests.whole_batch import assert_same

from .rank_training import WAYS, everything, train

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
