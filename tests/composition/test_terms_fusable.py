from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.terms import Fusable, Joint
from steelyard.gradients.layout import LogProbs


class Power:
    """Σ exp(t)^power over the log-probs' tokens, computed for all powers from one exponential."""

    calls = 0

    def __init__(self, power: int) -> None:
        self.power = power

    def compute(self, data: Any, logprobs: Sequence[Tensor], logits: Sequence[Tensor]) -> Tensor:
        return (torch.cat(list(logits)).exp() ** self.power).sum()

    def fuses_with(self, other: object, *, tracked: bool) -> bool:
        return isinstance(other, Power) and not tracked

    def compute_together(
        self,
        others: Sequence[Self],
        weights: Sequence[float],
        data: Any,
        logprobs: LogProbs,
        *,
        tracked: bool,
        **needed: Any,
    ) -> Joint:
        Power.calls += 1
        exponential = torch.cat(list(needed["logits"])).exp()
        values = [(exponential**each.power).sum() for each in (self, *others)]
        total = sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros(()))
        return Joint(values, total)


def pipeline(*terms: object, **options: Any) -> Pipeline:
    specs = [
        RegularizerSpec(fn, 0.5 * (i + 1), f"t{i}", needs=("logits",), run_in="inline")
        for i, fn in enumerate(terms)
    ]
    return Pipeline(lambda data, logprobs: logprobs[0].sum(), specs, gives=("logits",), **options)


LOGITS = [torch.tensor([0.0, 0.5]), torch.tensor([-1.0])]


def compute(made: Pipeline) -> Any:
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    return made.compute([], logprobs, given={"logits": LOGITS})


def test_the_protocol_asks_for_both_methods() -> None:
    assert isinstance(Power(1), Fusable)
    assert not isinstance(torch.nn.Identity(), Fusable)


def test_fusable_terms_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Power, "calls", 0)
    output = compute(pipeline(Power(1), Power(2)))
    assert Power.calls == 1
    flat = torch.cat(LOGITS).requires_grad_()
    one, two = flat.exp().sum(), (2 * flat).exp().sum()
    assert output.regularizers["t0"].value == pytest.approx(one.item())
    assert output.regularizers["t1"].value == pytest.approx(two.item())
    (expected,) = torch.autograd.grad(0.5 * one + 1.0 * two, flat)
    torch.testing.assert_close(torch.cat(list(output.extra_gradients["logits"])), expected)


def test_terms_that_do_not_fuse_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Power, "calls", 0)
    output = compute(pipeline(Power(1), Power(2), track_grad_norms=True))
    assert Power.calls == 0
    assert output.regularizers["t0"].grad_norm == pytest.approx(
        torch.cat(LOGITS).exp().norm().item()
    )
