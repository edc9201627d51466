"""Weights that follow epochs."""

from __future__ import annotations

import pytest
import torch

from steelyard import schedules
from steelyard.errors import InputError, SpecError
from steelyard.integrations import CompositeLoss, by_epoch, term


def weight(loss: CompositeLoss) -> float:
    loss(x=torch.ones(1, requires_grad=True))
    return loss.output.regularizers["term"].weight


def composite() -> CompositeLoss:
    tenth = by_epoch(schedules.linear(0.0, 1.0, steps=10))
    return CompositeLoss(lambda x: x.sum(), [term(lambda x: x.sum(), tenth, "term")])


def test_the_weight_follows_the_epoch_and_not_the_step() -> None:
    loss = composite()
    loss.step = 7
    assert weight(loss) == 0
    loss.epoch = 3
    assert weight(loss) == pytest.approx(0.3)
    loss.set_weight("term", by_epoch(schedules.linear(0.0, 2.0, steps=10)))
    assert weight(loss) == pytest.approx(0.6)


def test_the_epoch_is_saved() -> None:
    loss, other = composite(), composite()
    loss.epoch, loss.step = 4, 9
    other.load_state_dict(loss.state_dict())
    assert (other.epoch, other.step) == (4, 9)
    assert weight(other) == pytest.approx(0.4)


@pytest.mark.parametrize("epoch", [-1, 0.5, "1"])
def test_an_epoch_is_a_whole_number(epoch: int) -> None:
    with pytest.raises(InputError, match=r"epoch must be a whole number >= 0, got"):
        composite().epoch = epoch


def test_a_number_is_no_schedule() -> None:
    with pytest.raises(SpecError, match=r"takes a schedule, got 0\.1: a number needs no epochs"):
        by_epoch(0.1)  # type: ignore[arg-type]
