"""How much a micro-batch counts, asked of trainers with each rule of gradient accumulation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steelyard.errors import InputError
from steelyard.integrations.huggingface.accumulation import divides_by, divisor_of, micro_batch_of

BATCH = {"labels": torch.tensor([[1, 2, -100, 4], [5, 6, 7, -100]])}  # 4 tokens, shifted


def trainer(**changed: Any) -> Any:
    fields: dict[str, Any] = {
        "loss_is_scaled_for_ga": None,
        "model_accepts_loss_kwargs": True,
        "compute_loss_func": None,
        "current_gradient_accumulation_steps": 4,
        "_loss_shifts_labels": True,
        "args": SimpleNamespace(average_tokens_across_devices=False),
        "accelerator": SimpleNamespace(num_processes=3),
        "get_tp_size": lambda: 1,
    }
    return SimpleNamespace(**(fields | changed))


def test_tokens_count_if_the_loss_is_divided_by_those_of_the_step() -> None:
    assert micro_batch_of(trainer(), BATCH, 16) == (4 / 16, 1)
    assert micro_batch_of(trainer(), BATCH, torch.tensor(8)) == (torch.tensor(0.5), 1)
    unshifted = trainer(_loss_shifts_labels=False)
    assert micro_batch_of(unshifted, BATCH, 16) == (6 / 16, 1)
    func = trainer(model_accepts_loss_kwargs=False, compute_loss_func=print)
    assert micro_batch_of(func, BATCH, 16) == (4 / 16, 1)


def test_tokens_of_all_processes_are_compensated() -> None:
    across = trainer(args=SimpleNamespace(average_tokens_across_devices=True))
    assert micro_batch_of(across, BATCH, 16) == (3 * 4 / 16, 1)


@pytest.mark.parametrize(
    ("changed", "items"),
    [
        ({"loss_is_scaled_for_ga": False}, 16),
        ({"model_accepts_loss_kwargs": False}, 16),
        ({}, None),  # the model was given no number of items, so its loss is a mean
    ],
)
def test_a_loss_that_the_trainer_divides(changed: dict[str, Any], items: int | None) -> None:
    assert micro_batch_of(trainer(**changed), BATCH, items) == (1.0, 4)


def test_a_scaled_loss_without_labels_counts_one_nth() -> None:
    """As in GRPO, which divides its loss itself: nobody divides the terms afterwards."""
    scaled = trainer(loss_is_scaled_for_ga=True)
    assert micro_batch_of(scaled, {"prompt_ids": torch.zeros(2, 3)}, None) == (0.25, 1)


@pytest.mark.parametrize(
    ("changed", "batch"),
    [({"loss_is_scaled_for_ga": True}, BATCH), ({"compute_loss_func": print}, {})],
)
def test_a_rule_that_cannot_be_determined_is_refused(
    changed: dict[str, Any], batch: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=r"cannot be determined .*: set gradient_accumulation_ste"):
        micro_batch_of(trainer(**changed), batch, None)
    once = trainer(**changed, current_gradient_accumulation_steps=1)
    assert micro_batch_of(once, batch, None) == (1.0, 1)


def test_whether_a_loss_is_divided_by_the_number_of_items() -> None:
    divisor = divisor_of(16)
    x = torch.ones(3, requires_grad=True)
    assert divides_by((x.square().sum() / divisor.clamp(min=1)) * 2, divisor)
    assert not divides_by(x.square().mean(), divisor)
    assert not divides_by(torch.ones(()), divisor)


def test_a_mean_that_the_trainer_takes_for_scaled_counts_as_it_is() -> None:
    assert micro_batch_of(trainer(), BATCH, 16, counts_items=False) == (1.0, 1)
    across = trainer(args=SimpleNamespace(average_tokens_across_devices=True))
    assert micro_batch_of(across, BATCH, 16, counts_items=False) == (3.0, 1)
