from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition import inline_or_offloaded
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.evaluate import Evaluator
from steelyard.composition.input_names import term
from steelyard.composition.inputs import FlatInputs
from steelyard.composition.settings import Settings
from steelyard.composition.terms import Term
from steelyard.errors import GradientError

from .terms import LOGPROBS, constant, l2, nll, unwatched


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_terms_may_read_different_logprobs(run_in: Any) -> None:
    a, b = (torch.tensor(row, requires_grad=True) for row in ([-1.0, -2.0], [-3.0]))
    terms = [term(l2, 1.0, name, inputs=("data", name), run_in=run_in) for name in "ab"]
    loss = CompositeLoss(lambda a: 0 * a[0].sum(), terms)
    loss(data=[], a=[a], b=[b]).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([-2.0, -4.0], [-6.0])


@pytest.mark.parametrize("run_in", ["inline", "thread"])
def test_an_evaluator_gives_a_result_for_each_term(run_in: Any) -> None:
    settings = Settings(max_concurrency=2)
    inputs = FlatInputs([], [torch.tensor([-1.0, -2.0])], {}, ())
    terms = [
        Term(RegularizerSpec(l2, weight, name, run_in=run_in))
        for name, weight in {"a": 1.0, "b": 2.0}.items()
    ]
    found = Evaluator(inputs, settings).evaluate(terms, 0, tracked=False)
    assert [(r.term.name, r.weight, r.executor, r.method) for r in found] == [
        ("a", 1.0, run_in, "autograd"),
        ("b", 2.0, run_in, "autograd"),
    ]
    for result in found:
        (gradient,) = result.gradients["logprobs"]
        assert gradient is not None
        assert gradient.tolist() == [-2.0, -4.0]


@pytest.mark.parametrize("run_in", ["inline", "thread", "process"])
def test_autograd_demands_a_path(run_in: Any) -> None:
    spec = RegularizerSpec(constant, 1.0, "t", gradient="autograd", run_in=run_in)
    with pytest.raises(GradientError, match="one with no path to them") as caught:
        Pipeline(nll, [spec]).compute([], LOGPROBS)
    assert caught.value.term == "t"
    for cure in ("gradient='score'", "gradient='numerical'", "gradient='none'"):
        assert cure in str(caught.value)


def where(**more: Any) -> list[bool]:
    """Whether each of four calls ran in the caller's thread."""
    seen: list[bool] = []

    def note(_: Any, logprobs: list[Tensor]) -> Tensor:
        seen.append(threading.current_thread() is threading.main_thread())
        return logprobs[0].sum()

    pipeline = Pipeline(nll, [RegularizerSpec(note, 1.0, "note", **more)])
    for _ in range(4):
        pipeline.compute([], LOGPROBS)
    return seen


def test_a_cheap_term_moves_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_or_offloaded, "CHEAP", 60.0)
    assert where() == [False, True, True, True]


def test_a_long_term_stays_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_or_offloaded, "CHEAP", 0.0)
    assert where() == [False] * 4


def test_a_timeout_of_its_own_keeps_it_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_or_offloaded, "CHEAP", 60.0)
    assert where(timeout=10.0) == [False] * 4


def test_long_terms_overlap() -> None:
    """Each waits for the other: one after the other they would never meet."""
    meeting = threading.Barrier(2)

    def meet(_: Any, logprobs: list[Tensor]) -> Tensor:
        meeting.wait(250)
        return logprobs[0].sum()

    specs = [RegularizerSpec(meet, 1.0, name) for name in ("a", "b")]
    pipeline = unwatched(Pipeline(nll, specs, timeout=300, max_concurrency=2))
    output = pipeline.compute([], LOGPROBS)
    assert [r.value for r in output.regularizers.values()] == [-4.0, -4.0]
