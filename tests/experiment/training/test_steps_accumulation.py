"""Gradient accumulation: several calls before an optimizer step equal one call with all data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard.experiment import RunFolder, resume, train
from steelyard.experiment.training.base_losses import CrossEntropy
from steelyard.experiment.training.steps import call_shares
from steelyard.experiment.training.terms import Terms
from steelyard.regularizers import DPO, OverlongPenalty
from steelyard.spec.regularizer import RegularizerSpec
from tests.experiment.small_runs import (
    DRIFT,
    KL,
    L2,
    detached,
    noise,
    small_config,
    small_rollouts,
    stop_after,
    term,
    without_clock,
    write_data,
)

UNEVEN = [{"prompt": "Count", "completion": f" {n} " * n} for n in range(1, 13)]
HELD = {**KL, "weight": {"at_most": 1e-3}}


def total(data: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).square().sum()


total.reduction = "sum"  # type: ignore[attr-defined]  # how its calls are accumulated


def both(
    folder: Path, *overrides: str, regularizers: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics of four steps of six lines: in one call each, and in three."""
    shared = ("train.steps=4", "train.save_every=0", "train.drivers_every=1", *overrides)
    metrics = []
    for name, sizes in {
        "large": ("train.batch_size=6",),
        "calls": ("train.batch_size=2", "train.gradient_accumulation_steps=3"),
    }.items():
        config = small_config(folder, *shared, *sizes, regularizers=regularizers)
        write_data(folder / "train.jsonl", UNEVEN)
        train(config, folder / name)
        metrics.append([without_clock(line) for line in RunFolder(folder / name).metrics()])
    return metrics[0], metrics[1]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_calls_of_a_step_equal_one_large_batch(folder: Path, reduction: str) -> None:
    """Sums add up, and means are weighted by their tokens: the lines differ in length."""
    options = f"loss.reduction={reduction}"
    terms = [
        L2,
        {**KL, "options": {"estimator": "k2"}},
        {"use": "l1", "name": "l1", "weight": 0.01, "options": {"reduction": "sum"}},
        {"use": f"{__name__}:total", "name": "total", "weight": 0.001},
    ]
    large, calls = both(folder, options, regularizers=terms)
    assert [set(line) for line in calls] == [set(line) for line in large]
    for one, several in zip(large, calls, strict=True):
        for key, value in one.items():
            # Before the first update KL is rounding alone, and its cosines are those of noise.
            is_noise = one["step"] == 0 and key.startswith("cosines/") and "kl" in key
            is_noise |= key.endswith("l1_mean")  # of a sum: the mean of the calls, not of tokens
            if isinstance(value, float) and not is_noise and "surrogate_loss" not in key:
                assert several[key] == pytest.approx(value, rel=2e-3, abs=2e-5), key
    drivers = [RunFolder(folder / name).drivers() for name in ("large", "calls")]
    assert [(r["step"], r["term"]) for r in drivers[0]] == [
        (r["step"], r["term"]) for r in drivers[1]
    ]
    for one, several in zip(*drivers, strict=True):
        assert one["data"][0]["line"] == several["data"][0]["line"]
        assert several["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-3, abs=1e-5)


def test_a_bound_is_held_as_in_one_large_batch(folder: Path) -> None:
    large, calls = both(folder, "train.learning_rate=0.02", regularizers=[HELD])
    for one, several in zip(large, calls, strict=True):
        for field in ("value", "weight", "contribution", "violation"):
            key = f"regularizers/kl/{field}"
            assert several[key] == pytest.approx(one[key], rel=0.1, abs=1e-4), key
    assert calls[-1]["regularizers/kl/weight"] > 0
    assert calls[-1]["regularizers/kl/violation"] > 0


def test_rollouts_are_divided_into_calls(folder: Path) -> None:
    whole = small_rollouts(folder, regularizers=[KL])
    train(whole, folder / "whole")
    divided = small_rollouts(folder, "train.gradient_accumulation_steps=3", regularizers=[KL])
    train(divided, folder / "divided")
    lines = [RunFolder(folder / name).metrics() for name in ("whole", "divided")]
    first, last = lines[0][0], lines[1][0]
    for key in ("loss_total", "base_loss/value", "ratio", "optim/unclipped_grad_l2:mean"):
        assert last[key] == pytest.approx(first[key], rel=1e-3, abs=1e-5), key
    answers = [RunFolder(folder / name).rollouts() for name in ("whole", "divided")]
    assert [a["answer"] for a in answers[0][:8]] == [a["answer"] for a in answers[1][:8]]


def test_an_interrupted_run_is_resumed_to_the_same_bits(folder: Path) -> None:
    config = small_config(
        folder, "train.steps=4", "train.save_every=2", "train.gradient_accumulation_steps=2",
        regularizers=[L2, DRIFT, HELD, term(noise)],
    )  # fmt: skip
    train(config, folder / "whole")
    train(config, folder / "r", stop=stop_after(3))
    resume(folder / "r")
    whole, resumed = (RunFolder(folder / name).metrics() for name in ("whole", "r"))
    assert [without_clock(line) for line in resumed] == [without_clock(line) for line in whole]


def datum(tokens: int, **fields: Any) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([1] * tokens),
        loss_fn_inputs={"target_tokens": [2] * tokens, **fields},  # type: ignore[dict-item]  # lists
    )


def test_shares_are_those_of_the_denominators() -> None:
    weights = [[0.0, 1.0, 1.0], [1.0], [0.0, 0.0]]
    calls = [[datum(len(row), weights=row)] for row in weights]
    specs = (
        RegularizerSpec(noise, 1.0, "mean"),
        RegularizerSpec(total, 1.0, "sum"),
        RegularizerSpec(total, name="bounded", at_most=1.0),
        RegularizerSpec(DPO(), 1.0, "pairs"),
        RegularizerSpec(OverlongPenalty(max_length=2, buffer=2), 1.0, "long"),
    )
    shares = call_shares(Terms(CrossEntropy(), specs), calls)
    assert [share["base"] for share in shares] == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert [share["mean"] for share in shares] == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert [share["long"] for share in shares] == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert [share["bounded"] for share in shares] == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert [share["pairs"] for share in shares] == pytest.approx([1 / 3] * 3)
    assert not any("sum" in share for share in shares)
    assert call_shares(Terms(CrossEntropy(reduction="sum"), ()), calls) == [{}, {}, {}]
    without = call_shares(Terms(detached, ()), [[datum(1)], [datum(3)]])
    assert without == [{"base": 0.25}, {"base": 0.75}]
    empty = [[datum(1, weights=[0.0])], [datum(3, weights=[0.0] * 3)]]
    assert call_shares(Terms(detached, ()), empty) == [{"base": 0.5}, {"base": 0.5}]


def decay(data: Any, logprobs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([p.square().sum() for p in parameters.values()]).sum()


@pytest.mark.parametrize("space", ["logprobs", "parameters"])
def test_gradients_of_parameters_add_up(folder: Path, space: str) -> None:
    terms = [
        {"use": "l1", "name": "l1", "weight": 0.01, "options": {"reduction": "sum"}},
        {**L2, "anchor": True},
        {"use": f"{__name__}:decay", "name": "decay", "weight": 0.1, "needs": ["parameters"]},
        {**HELD, "weight": {"at_least": 0.01}, "name": "held"},
    ]
    large, calls = both(
        folder, f"train.grad_space={space}",
        "train.learning_rate=0.02", regularizers=terms,
    )  # fmt: skip
    norm = "regularizers/decay/grad_norm"
    for one, several in zip(large, calls, strict=True):
        assert several.keys() == one.keys()
        for key, value in one.items():
            held = one["step"] == 0 and "held" in key  # before the first update it is rounding
            if held or "held/weight" in key or "held/progress" in key:
                continue
            if key.endswith("grad_space"):
                assert several[key] == value
            if "grad_norm" in key or key.startswith("cosines/"):
                assert several[key] == pytest.approx(value, rel=5e-3, abs=1e-4), key
    assert norm in large[0]
    assert large[1]["base_loss/grad_space"] == space
