"""The base class of transforms: selection of parameters, order, and scheduled strengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from steelyard import schedules
from steelyard.errors import SpecError
from steelyard.integrations.optim import (
    Transform,
    adaptive_clip,
    attach,
    clip_by_global_norm,
    elastic_net_decay,
    l1_decay,
    l2_decay,
)
from steelyard.integrations.optim.transform import Slot, Strength
from tests.integrations.optim.transform_checks import parameter, transformed


def test_subclass_with_its_own_apply() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Flip(Transform):
        def apply(self, slots: Sequence[Slot], step: int, *, first: bool) -> None:
            for slot in slots:
                slot.gradient.mul_(-1 if step == 0 else 3)

    weights = parameter([1.0, 1.0], [1.0, 1.0])
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attach(optimizer, [Flip(name="flip"), l2_decay(0.5)])
    optimizer.step()
    assert weights.grad.tolist() == [-0.5, -0.5]  # type: ignore[union-attr]  # set above
    optimizer.step()
    assert weights.grad.tolist() == [-1.0, -1.0]  # type: ignore[union-attr]  # set above


def test_where_that_selects_nothing_lists_the_parameters() -> None:
    optimizer = torch.optim.SGD(list(nn.Linear(3, 2).named_parameters()), lr=0.1)
    with pytest.raises(SpecError) as caught:
        attach(optimizer, [l2_decay(0.1, where=lambda p: p.ndim == 4)])
    assert str(caught.value) == (
        "where must choose a parameter, got none (l2_decay); there are: weight; bias."
    )
    many = torch.optim.SGD([Parameter(torch.ones(n + 1)) for n in range(9)], lr=0.1)
    message = r"there are: parameter 0 of group 0, shape \(1,\); .*, shape \(8,\); …\.$"
    with pytest.raises(SpecError, match=message):
        attach(many, [l2_decay(0.1, where=lambda p: False)])


def test_transforms_are_applied_in_the_order_listed() -> None:
    clip, decay = clip_by_global_norm(1.0), l2_decay(1.0)
    [first] = transformed(clip, decay, parameters=[parameter([3.0], [4.0])])
    [second] = transformed(decay, clip, parameters=[parameter([3.0], [4.0])])
    assert (first.item(), second.item()) == (4.0, 1.0)


def test_later_transforms_see_weights_after_decoupled_decay() -> None:
    weights = parameter([[4.0]], [[9.0]])
    shrink = l2_decay(1.0, decoupled=True)
    [gradient] = transformed(shrink, adaptive_clip(1.0), parameters=[weights], lr=0.5)
    assert gradient.item() == 2.0


def test_strength_of_a_number_and_of_a_schedule() -> None:
    assert Strength("d", 2).at(7) == 2.0
    assert Strength("d", lambda step: step / 4).at(7) == 1.75
    assert Strength("d", 0.0).at(0) == 0.0


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, "1", True])
def test_strength_refuses_what_is_not_a_finite_number_from_zero(value: Any) -> None:
    with pytest.raises(SpecError, match=r"^d must be a finite number >= 0, or a schedule"):
        Strength("d", value)
    scheduled = Strength("d", lambda step: value)
    with pytest.raises(SpecError, match=r"^d must be .* at step 3\.$"):
        scheduled.at(3)


def test_strength_above_zero_refuses_zero() -> None:
    with pytest.raises(SpecError, match=r"^c must be a finite number > 0, .* got 0\.0\.$"):
        Strength("c", 0.0, above_zero=True)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (l2_decay, lambda g: (g.item() - 8.0) / 2.0),
        (l1_decay, lambda g: g.item() - 8.0),
        (lambda s: elastic_net_decay(s, 0.5), lambda g: (g.item() - 8.0) / 1.5),
        (clip_by_global_norm, lambda g: g.item()),
        (adaptive_clip, lambda g: g.item() / 2.0),
    ],
)
def test_schedules_follow_the_steps_of_the_optimizer(make: Any, read: Any) -> None:
    schedule = schedules.piecewise({0: 0.5, 1: 1.0, 3: 2.0})
    weights = parameter([[2.0]], [[8.0]])
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attach(optimizer, [make(schedule)])
    found = []
    for _ in range(4):
        weights.grad = torch.full_like(weights, 8.0)
        optimizer.step()
        found.append(read(weights.grad))
    assert found == pytest.approx([0.5, 1.0, 1.0, 2.0])


def test_schedules_by_epoch() -> None:
    by_epoch = schedules.by_epoch(schedules.linear(0.0, 1.0, 2), steps_per_epoch=2)
    weights = parameter([1.0], [0.0])
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attach(optimizer, [l2_decay(by_epoch)])
    found = []
    for _ in range(5):
        weights.grad = torch.zeros_like(weights)
        optimizer.step()
        found.append(weights.grad.item())
    assert found == [0.0, 0.0, 0.5, 0.5, 1.0]


def test_a_bad_number_of_a_schedule_names_the_step() -> None:
    weights = parameter([1.0], [1.0])
    optimizer = torch.optim.SGD([weights], lr=0.0)
    attach(optimizer, [clip_by_global_norm(lambda step: 1.0 - step)])
    optimizer.step()
    with pytest.raises(SpecError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "max of clip_by_global_norm must be a finite number > 0, or a schedule that gives such, "
        "got 0.0 at step 1."
    )
