"""`Trainer` in two real processes, with DDP and FSDP2, against one process on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.process_group import run_group
from tests.whole_batch import assert_same

from .rank_training import (
    AGGREGATED,
    TRL_WAYS,
    alone,
    everything,
    train_aggregated,
    train_trl,
    trl_terms,
)
from .trl_trainers import build

Found = list[dict[str, Any]]
VIOLATION = "regularizers/bounded/violation"


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    return run_group(everything, folder, 2, folder)


@pytest.fixture(scope="module")
def whole() -> dict[int, Any]:
    return {accumulation: alone(accumulation) for accumulation in (1, 4)}


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k == "loss" or ("/" in k and k != VIOLATION)}


def compared(row: dict[str, Any]) -> dict[str, float]:
    """Norms and cosines of a log line; `grad_norm` is the trainer's own."""
    names = [name for name in row if name.endswith(("_grad_norm", "/grad_norm", "_norm_weighted"))]
    return {name: row[name] for name in row if name in names or name.startswith("cosines/")}


@pytest.mark.parametrize("way", ["ddp 1", "ddp 4", "fsdp 1", "fsdp 4"])
def test_it_equals_one_process_on_the_whole_batch(
    group: Found, whole: dict[int, Any], way: str
) -> None:
    expected = whole[int(way[-1])]
    for rank in group:
        found = rank[way]
        assert found["sharded"] == way.startswith("fsdp")
        for mine, other in zip(found["gradients"], expected["gradients"], strict=True):
            assert_same(mine, other)
        for mine, other in zip(found["log"], expected["log"], strict=True):
            assert numbers(mine) == pytest.approx(numbers(other), rel=1e-6, abs=1e-6)
            # A difference of values of 40 in float32.
            assert mine[VIOLATION] == pytest.approx(other[VIOLATION], abs=4e-5)
        torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=0, atol=1e-6)
        for name, other in expected["output"]["regularizers"].items():
            mine = found["output"]["regularizers"][name]
            for key in ("value", "weight", "contribution"):
                assert mine[key] == pytest.approx(other[key], rel=1e-6, abs=1e-6)
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
    expected = alone(1, bf16=True, max_steps=2)
    for rank in group:
        for mine, other in zip(rank["bf16"]["log"], expected["log"], strict=True):
            assert numbers(mine) == pytest.approx(numbers(other), rel=2e-2, abs=2e-2)


def test_a_resumed_run_equals_an_uninterrupted_one(group: Found) -> None:
    for rank in group:
        straight, resumed = rank["fsdp 4"], rank["half, then"]
        torch.testing.assert_close(resumed["parameters"], straight["parameters"], rtol=0, atol=1e-7)
        assert resumed["state"] == straight["state"]
        assert resumed["log"][2:] == [
            {**row, "grad_norm": mine["grad_norm"]}
            for row, mine in zip(straight["log"][2:], resumed["log"][2:], strict=True)
        ]


@pytest.mark.parametrize("way", AGGREGATED, ids=str)
def test_an_aggregator_trains_as_one_process(
    group: Found, way: tuple[str, str, int], tmp_path: Path
) -> None:
    expected = train_aggregated(tmp_path, *way[1:])
    assert max(abs(factor - 1) for factor in expected["factors"].values()) > 0.01
    for rank in group:
        found = rank["aggregated"][way]
        assert_same(found["parameters"], expected["parameters"])
        for key in ("factors", "cosines"):
            assert found[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-6), key
        if way[1] == "logits":
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        for mine, other in zip(found["log"], expected["log"], strict=True):
            # Of several micro-batches the norm of the sum is not known: none is logged.
            logged = compared(other) if way[2] == 1 else {}
            assert compared(mine) == pytest.approx(logged, rel=1e-6, abs=1e-6)
            if logged:  # the trainer's own is of the gradients that train
                assert mine["total_grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert ("total_grad_norm" in compared(expected["log"][0])) == (way[1] == "logits")


@pytest.mark.parametrize("way", [way for way in TRL_WAYS if way[0] == "SFT"], ids=str)
def test_sft_equals_one_process(group: Found, way: tuple[str, str, int], tmp_path: Path) -> None:
    expected = train_trl("SFT", tmp_path, way[2])
    for rank in group:
        found = rank["trl"][way]
        assert found["sharded"] == (way[1] == "fsdp")
        for mine, other in zip(found["gradients"], expected["gradients"], strict=True):
            assert_same(mine, other)
        ((mine, other),) = zip(found["log"], expected["log"], strict=True)
        for key in ("loss", "regularizers/entropy/value", "regularizers/z/contribution"):
            assert mine[key] == pytest.approx(other[key], rel=1e-6, abs=1e-6)
        for name, each in expected["output"]["regularizers"].items():
            value = found["output"]["regularizers"][name]["value"]
            assert value == pytest.approx(each["value"], rel=1e-6)


def joined(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One batch of all rows: prompts are padded on the left, completions on the right."""
    merged = {"num_items_in_batch": batches[0]["num_items_in_batch"]}
    for name in batches[0].keys() - merged.keys():
        parts = [batch[name] for batch in batches]
        if parts[0].dim() == 2:
            width = max(part.shape[1] for part in parts)
            left = name.startswith("prompt")
            lacking = [width - part.shape[1] for part in parts]
            sides = [(n, 0) if left else (0, n) for n in lacking]
            parts = [functional.pad(p, side) for p, side in zip(parts, sides, strict=True)]
        merged[name] = torch.cat(parts)
    return merged


@pytest.mark.parametrize("way", [way for way in TRL_WAYS if way[0] == "GRPO"], ids=str)
def test_grpo_equals_one_process_on_the_same_answers(
    group: Found, way: tuple[str, str, int], tmp_path: Path
) -> None:
    found = [rank["trl"][way] for rank in group]
    trainer = build("GRPO", tmp_path, way[2], terms=trl_terms("GRPO"))
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = way[2]
    total = 0.0
    for batches in zip(*(rank["batches"] for rank in found), strict=True):
        loss = trainer.compute_loss(model, joined(batches))
        loss.backward()
        total += loss.item()
    output = trainer.regularizers.composite.output
    for rank in found:
        assert rank["sharded"] == (way[1] == "fsdp")
        assert_same(rank["gradients"][0], [p.grad for p in model.parameters()])
        assert rank["log"][0]["loss"] == pytest.approx(total, rel=1e-6, abs=1e-6)
        assert rank["output"]["loss_total"] == pytest.approx(output.loss_total, rel=1e-6, abs=1e-6)
        value = rank["output"]["regularizers"]["entropy"]["value"]
        assert value == pytest.approx(output.regularizers["entropy"].value, rel=1e-6)


def test_accelerate_saves_and_loads_the_state_of_a_loss(group: Found) -> None:
    for rank in group:
        saved, loaded = rank["accelerate"]
        assert saved == loaded
        assert saved["terms"]["adaptive"]["multiplier"] > 1
        assert saved["terms"]["bounded"]["multiplier"]["calls"] == 1
