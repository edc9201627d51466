"""Means of the components of a loss over micro-batches and steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import itself, reads, term
from steelyard.composition.terms import TermResult
from steelyard.integrations.huggingface.metrics import MetricAccumulator


def results(loss: float, value: float, *, step: int = 0, **options: Any) -> Sequence[TermResult]:
    """The results of a composite whose base loss is `loss` and whose term is `value`."""
    composite = CompositeLoss(
        reads(itself, "loss"),
        [term(itself, 0.5, "size", inputs="size", gradient="none", **options)],
        check_finite=False,
    )
    composite.step = step
    composite(loss=torch.tensor(loss, requires_grad=True), size=torch.tensor(value))
    return composite.results


def test_micro_batches_that_the_trainer_divides_are_averaged() -> None:
    metrics = MetricAccumulator()
    metrics.add(results(1.0, 10.0), divisor=2)
    metrics.add(results(3.0, 20.0), divisor=2)
    metrics.end_step()
    assert metrics.read(["size"]) == {
        "base_loss/value": 2.0,
        "regularizers/size/value": 15.0,
        "regularizers/size/weight": 0.5,
        "regularizers/size/contribution": 7.5,
    }


def test_shares_weigh_terms_and_the_divided_base_losses_are_summed() -> None:
    metrics = MetricAccumulator()
    metrics.add(results(1.0, 10.0), 0.25)
    metrics.add(results(3.0, 20.0), torch.tensor(0.75))
    metrics.end_step()
    assert metrics.read(["size"]) == pytest.approx(
        {
            "base_loss/value": 4.0,
            "regularizers/size/value": 17.5,
            "regularizers/size/weight": 0.5,
            "regularizers/size/contribution": 8.75,
        }
    )


def test_values_and_weights_are_logged_as_they_are_if_the_shares_do_not_add_up_to_1() -> None:
    metrics = MetricAccumulator()
    metrics.add(results(1.0, 10.0), 0.25)
    metrics.add(results(3.0, 20.0), 0.25)
    metrics.end_step()
    assert metrics.read(["size"]) == pytest.approx(
        {
            "base_loss/value": 4.0,
            "regularizers/size/value": 15.0,
            "regularizers/size/weight": 0.5,
            "regularizers/size/contribution": 3.75,  # that is what the loss has
        }
    )


def test_a_term_that_was_skipped_in_one_micro_batch_adds_its_part_to_the_loss() -> None:
    metrics = MetricAccumulator()
    metrics.add(results(1.0, 10.0), divisor=2)
    metrics.add(results(3.0, 20.0)[:1], divisor=2)
    metrics.end_step()
    found = metrics.read(["size"])
    assert found["regularizers/size/value"] == 10.0
    assert found["regularizers/size/contribution"] == 2.5  # (0.5 · 10 + 0) / 2


def test_contributions_are_means_over_all_steps_and_values_over_those_of_the_term() -> None:
    metrics = MetricAccumulator()
    for step in range(4):
        metrics.add(results(2.0, 8.0, step=step, every=2))
        metrics.end_step()
    found = metrics.read(["size"])
    assert found["base_loss/value"] == 2.0
    assert found["regularizers/size/value"] == 8.0
    assert found["regularizers/size/weight"] == 0.5
    assert found["regularizers/size/contribution"] == 2.0  # 0.5 · 8 in two of four steps


def test_a_value_that_is_not_finite_is_replaced_by_the_mean_of_the_others() -> None:
    metrics = MetricAccumulator()
    for value in (6.0, math.nan, 10.0):
        metrics.add(results(1.0, value), divisor=3)
    metrics.end_step()
    found = metrics.read(["size"])
    assert found["regularizers/size/value"] == 8.0
    assert found["regularizers/size/contribution"] == 4.0


def test_reading_resets_and_a_term_that_never_ran_is_left_out() -> None:
    metrics = MetricAccumulator()
    assert metrics.is_empty
    metrics.add(results(1.0, 2.0))
    assert not metrics.is_empty
    assert metrics.read(["size"]) == {}  # the step has not ended
    metrics.end_step()
    assert "regularizers/other/value" not in metrics.read(["size", "other"])
    assert metrics.read(["size"]) == {}
    metrics.add(results(5.0, 6.0))
    metrics.end_step()
    assert metrics.read(["size"])["regularizers/size/value"] == 6.0
