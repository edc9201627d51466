"""State of terms over the micro-batches of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import RegularizerSpec
from steelyard.composition.bounds import GAIN, KI
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import itself, reads, term
from steelyard.integrations.huggingface.accumulation import StepState
from steelyard.regularizers import Adaptive, EMADrift


class Log:
    """State of every kind."""

    name = "log"

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"calls": 0, "mean": torch.zeros(2), "last": "", "ids": {}}

    def compute(self, data: Any, logprobs: Any) -> Tensor:
        value = torch.cat(list(logprobs)).sum()
        self.state = {
            "calls": self.state["calls"] + 1,
            "mean": self.state["mean"] + value.detach(),
            "last": str(value.item()),
            "ids": {**self.state["ids"], int(value.item()): torch.tensor(int(value.item()))},
        }
        return value

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = dict(state)


def run(fn: Any, values: list[float], *, restore: bool = True) -> Any:
    """The state of a term after one step with a micro-batch for each value."""
    composite = CompositeLoss(reads(itself, "loss"), [term(fn, 1.0, inputs=("data", "logprobs"))])
    state = StepState(composite)
    for value in values:
        if restore:
            state.begin_micro_batch()
        row = torch.tensor([value], requires_grad=True)
        composite(loss=row.sum(), data=[], logprobs=[row])
        state.end_micro_batch()
    state.end_step()
    return fn


def adaptive() -> Adaptive:
    return Adaptive(regularizer="l1", target=1.0, rate=0.5, clip=1.0)


def test_four_micro_batches_move_an_adaptive_weight_as_much_as_one() -> None:
    one = run(adaptive(), [-1.2]).multiplier
    assert one == pytest.approx(1.1)
    assert run(adaptive(), [-1.2] * 4).multiplier == pytest.approx(one)
    assert run(adaptive(), [-1.2] * 4, restore=False).multiplier == pytest.approx(1.1**4)


def test_the_update_is_that_of_the_mean_value() -> None:
    assert run(adaptive(), [-1.0, -1.4]).multiplier == pytest.approx(1.1)
    first = run(EMADrift(decay=0.5), [-1.0, -3.0])
    assert first.state_dict() == {"average": -2.0}
    assert run(first, [-4.0, -8.0]).state_dict() == {"average": 0.5 * -2 + 0.5 * -6}


def test_a_bound_moves_by_the_mean_of_the_micro_batches() -> None:
    spec = RegularizerSpec(lambda data, logprobs: -logprobs[0].sum(), name="kl", at_most=0.5)
    composite = CompositeLoss(reads(itself, "loss"), [spec])
    state = StepState(composite)
    for step, values in enumerate([[-1.0, -2.0], [-0.5]]):
        composite.step = step
        for value in values:
            state.begin_micro_batch()
            row = torch.tensor([value], requires_grad=True)
            composite(loss=4.0 + 0 * row.sum(), data=[], logprobs=[row])
            state.end_micro_batch()
        state.end_step()
    # Errors 1 and 3 in the first step, none in the second: its weight is the unit times the gain.
    assert composite.output.regularizers["kl"].weight == pytest.approx(
        4.0 / 0.5 * GAIN * math.exp(2 * KI)
    )


def test_numbers_are_averaged_and_the_rest_is_the_last() -> None:
    state = run(Log(), [1.0, 3.0]).state
    assert state["calls"] == 1
    assert state["mean"].tolist() == [2.0, 2.0]
    assert state["last"] == "3.0"
    assert state["ids"] == {3: torch.tensor(3)}


def test_terms_without_state_are_left_alone() -> None:
    composite = CompositeLoss(reads(itself, "loss"), [term(lambda loss: loss, 1.0, "again")])
    state = StepState(composite)
    for _ in range(2):
        state.begin_micro_batch()
        composite(loss=torch.ones((), requires_grad=True))
        state.end_micro_batch()
    state.end_step()
    assert composite.get_extra_state()["terms"] == {}
