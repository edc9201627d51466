"""`Trainer` in two real processes, with DDP and FSDP2, against one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.process_group import run_group

from .rank_training import alone, everything

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    return run_group(everything, folder, 2, folder)


@pytest.fixture(scope="module")
def whole() -> dict[int, Any]:
    return {accumulation: alone(accumulation) for accumulation in (1, 4)}


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k == "loss" or "/" in k}


@pytest.mark.parametrize("way", ["ddp 1", "ddp 4", "fsdp 1", "fsdp 4"])
def test_it_equals_one_process_on_the_whole_batch(
    group: Found, whole: dict[int, Any], way: str
) -> None:
    expected = whole[int(way[-1])]
    for rank in group:
        found = rank[way]
        assert found["sharded"] == way.startswith("fsdp")
        for mine, other in zip(found["gradients"], expected["gradients"], strict=True):
            for a, b in zip(mine, other, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * b.abs().max().item() + 1e-7)
        for mine, other in zip(found["log"], expected["log"], strict=True):
            assert numbers(mine) == pytest.approx(numbers(other), rel=1e-6, abs=1e-6)
        torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=0, atol=1e-6)
        for name, other in expected["output"]["regularizers"].items():
            mine = found["output"]["regularizers"][name]
            for key in ("value", "weight", "contribution"):
                assert mine[key] == pytest.approx(other[key], rel=1e-6)
        assert found["output"]["loss_total"] == pytest.approx(
            expected["output"]["loss_total"], rel=1e-6
        )
        assert found["state"]["step"] == expected["state"]["step"]
        assert found["state"] == group[0][way]["state"]
        assert found["state"]["terms"]["adaptive"]["multiplier"] == pytest.approx(
            expected["state"]["terms"]["adaptive"]["multiplier"], rel=1e-6
        )


def test_a_bound_is_at_work(whole: dict[int, Any]) -> None:
    for each in whole.values():
        assert all(row["regularizers/bounded/contribution"] > 0.01 for row in each["log"])


def test_bfloat16_is_close_to_one_process(group: Found) -> None:
    expected = alone(1, bf16=True)
    for rank in group:
        for mine, other in zip(rank["bf16"]["log"], expected["log"], strict=True):
            assert numbers(mine) == pytest.approx(numbers(other), rel=2e-2, abs=2e-2)


def test_a_resumed_run_equals_an_uninterrupted_one(group: Found) -> None:
    for rank in group:
        straight, resumed = rank["fsdp 4"], rank["half, then"]
        torch.testing.assert_close(
            resumed["parameters"], straight["parameters"], rtol=0, atol=1e-7
        )
        assert resumed["state"] == straight["state"]
        assert resumed["log"][2:] == [
            {**row, "grad_norm": mine["grad_norm"]}
            for row, mine in zip(straight["log"][2:], resumed["log"][2:], strict=True)
        ]
