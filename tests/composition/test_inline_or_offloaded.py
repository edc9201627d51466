from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec, Workers
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.inline_or_offloaded import Job
from steelyard.composition.input_names import reads, term
from steelyard.composition.terms import LostStateWarning, Term, TermResult
from steelyard.errors import GradientError, InputError, NonFiniteError, SpecError, TermTimeoutError
from steelyard.execution.executor import Executor, Ticket
from steelyard.gradients.isolated import IsolatedCall, ValueAndGradient
from steelyard.gradients.layout import flatten

from .models import Net, activity, batch, confidence, cross_entropy, gradients, listening, patient
from .terms import LOGPROBS, l2, nll

WAYS: list[dict[str, Any]] = [
    {"run_in": "thread"},
    {"run_in": "process"},
    {"timeout": 300.0},
    {"gradient": "numerical"},
]


def totals(terms: list[Any], **settings: Any) -> tuple[CompositeLoss, float, list[Tensor]]:
    model, (x, labels) = Net(), batch()
    loss = CompositeLoss(cross_entropy, terms, **settings)
    total = loss(model(x), labels=labels)
    total.backward()
    return loss, total.item(), gradients(model)


@pytest.mark.parametrize("how", WAYS)
def test_every_way_of_running_gives_the_same(how: Any) -> None:
    inline = [term(activity, 0.5, "activity"), term(confidence, 0.25, "confidence")]
    apart = [term(activity, 0.5, "activity", **how), term(confidence, 0.25, "confidence", **how)]
    here, value, expected = totals(inline, track_grad_norms=True)
    there, total, found = totals(apart, track_grad_norms=True)
    assert total == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    mine, theirs = there.output, here.output
    assert list(mine.regularizers) == list(theirs.regularizers)
    assert mine.regularizers["activity"].custom == theirs.regularizers["activity"].custom
    for name, each in mine.regularizers.items():
        norm = theirs.regularizers[name].grad_norm
        assert each.grad_norm == pytest.approx(norm, rel=1e-6)
    assert mine.cosines == pytest.approx(theirs.cosines, abs=1e-6)


def test_async_terms_and_an_async_base() -> None:
    _, value, expected = totals([term(confidence, 0.25, "c")])
    loss, total, found = totals([term(patient, 0.25, "c")])
    assert total == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(found, expected)
    assert list(loss.output.regularizers) == ["c"]

    async def base(logits: Tensor, labels: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return cross_entropy(logits, labels)

    model, (x, labels) = Net(), batch()
    CompositeLoss(base, [term(confidence, 0.25, "c")])(model(x), labels=labels).backward()
    torch.testing.assert_close(gradients(model), expected)


def test_the_order_of_the_terms_is_kept() -> None:
    terms = [
        term(confidence, 0.1, "first"),
        term(confidence, 0.2, "second", run_in="thread"),
        term(confidence, 0.3, "third"),
    ]
    loss, *_ = totals(terms)
    assert list(loss.output.regularizers) == ["first", "second", "third"]


def loop_for_ever(logits: Tensor) -> Tensor:
    while True:
        pass


def test_a_process_that_takes_too_long_is_killed() -> None:
    slow = term(loop_for_ever, 1.0, "slow", run_in="process", timeout=0.2)
    with pytest.raises(TermTimeoutError, match="slow") as caught:
        totals([slow])
    assert caught.value.term == "slow"
    skipped = term(loop_for_ever, 1.0, "slow", run_in="process", timeout=0.2, on_error="skip")
    loss, total, _ = totals([term(confidence, 0.25, "c"), skipped])
    assert total == totals([term(confidence, 0.25, "c")])[1]
    assert loss.output.skipped["slow"].startswith("TermTimeoutError: ")


def test_a_gradient_that_is_not_finite_is_a_failure() -> None:
    def root(hidden: Tensor) -> Tensor:
        return (hidden * 0).sqrt().sum()

    with pytest.raises(NonFiniteError, match="the gradient of regularizer 'root' must be finite"):
        totals([term(root, 1.0, "root", run_in="thread")])
    loss, *_ = totals([term(root, 1.0, "root", run_in="thread", on_error="skip")])
    assert list(loss.output.skipped) == ["root"]
    _, _, found = totals([term(root, 1.0, "root", run_in="thread")], check_finite=False)
    assert found[0].isnan().any()


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@dataclass
class Out:
    logits: Tensor
    pair: Pair
    labels: tuple[str, ...] = ("x",)
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.logits * 2


def nested(out: Out, more: dict[str, list[Tensor]], scale: Tensor) -> Tensor:
    assert out.labels == ("x",)
    assert more["halves"][0].dtype == torch.float16
    assert more["halves"][1].dtype == torch.int64
    product = (out.logits * out.pair.a).sum() + out.pair.b.square().sum() + out.twice.sum()
    return product * scale.sum() + more["halves"][0].float().sum() * more["halves"][1].sum()


@pytest.mark.parametrize("how", [{"run_in": "thread"}, {"run_in": "process"}])
def test_nested_inputs_of_many_dtypes(how: Any) -> None:
    def run(**settings: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        a, b = torch.randn(3, requires_grad=True), torch.randn(2, 2, dtype=torch.float64)
        half = torch.ones(2, dtype=torch.float16, requires_grad=True)
        b.requires_grad_()
        loss = CompositeLoss(lambda a: a.sum(), [term(nested, 0.5, "nested", **settings)])
        out = Out(a * 2, Pair(a, b))
        more = {"halves": [half, torch.tensor([1, 2])]}
        total = loss(out=out, a=a, more=more, scale=torch.tensor([2.0]))
        return total, torch.autograd.grad(total, (a, b, half))

    (value, expected), (total, found) = run(), run(**how)
    torch.testing.assert_close(total.double(), value.double(), rtol=1e-6, atol=0)
    for gradient, wanted in zip(found, expected, strict=True):
        assert gradient.dtype == wanted.dtype
        torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=0)


def test_a_numerical_gradient_moves_what_the_term_reads_alone() -> None:
    # 20,000 evaluations would be an error: neither what needs no gradient is moved, nor what
    # another term reads.
    calls = []

    def smooth(x: Tensor, target: Tensor) -> Tensor:
        calls.append(x.dtype)
        return (x - target[:3]).dot(target[:3])  # which wants one dtype

    x, big = torch.ones(3, requires_grad=True), torch.ones(10_000, requires_grad=True)
    terms = [
        term(smooth, 1.0, "smooth", gradient="numerical"),
        term(lambda big: big.sum(), 1.0, "big", run_in="thread"),
    ]
    loss = CompositeLoss(lambda x: x.sum(), terms)
    loss(x=x, big=big, target=torch.full((10_000,), 3.0)).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((3,), 1 + 3.0))
    assert calls.count(torch.float32) == 1
    assert calls.count(torch.float64) == len(calls) - 1 == 2 * 3


def judged(data: Any, logprobs: list[Tensor], bonus: float = 0.0) -> list[float]:
    return [1.0 + bonus, 2.0 + bonus, 4.0 + bonus]


@pytest.mark.parametrize("way", ["named", "parameters", "classic"])
def test_score_gradients(way: str) -> None:
    expected = Pipeline(nll, [RegularizerSpec(judged, 0.5, "s", gradient="score")]).compute(
        [], LOGPROBS
    )
    leaves = [lp.clone().requires_grad_() for lp in LOGPROBS]
    if way == "named":
        names = ("rows", "scores")
        terms = [term(judged, 0.5, "s", inputs=names, gradient="score")]
        loss = CompositeLoss(reads(nll, *names), terms)
        other = torch.ones(2, requires_grad=True)
        total = loss(rows=[], scores=leaves, other=other)
    elif way == "parameters":
        terms = [term(judged, 0.5, "s", gradient="score")]
        loss = CompositeLoss(reads(nll, "data", "logprobs"), terms)
        total = loss(data=[], logprobs=leaves, bonus=2.0) - 0.5 * 2.0
    else:
        loss = CompositeLoss(
            reads(nll, "data", "logprobs"), [RegularizerSpec(judged, 0.5, "s", gradient="score")]
        )
        total = loss(data=[], logprobs=leaves)
    total.backward()
    assert total.item() == pytest.approx(expected.loss_total)
    for leaf, gradient in zip(leaves, expected.gradients, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


def test_a_score_needs_data_and_logprobs() -> None:
    with pytest.raises(SpecError, match=r"reads the data and their log-probs, got \['logits'\]"):
        term(confidence, 0.5, "s", gradient="score")


def test_needs_are_read_from_the_inputs() -> None:
    def through(data: Any, logprobs: Any, *, logits: list[Tensor], scale: float) -> Tensor:
        total: Tensor = scale * logits[0].square().sum() + logprobs[0].sum()
        return total

    def total(**how: Any) -> tuple[float, list[Tensor]]:
        leaves = [lp.clone().requires_grad_() for lp in LOGPROBS]
        logits = [torch.ones(2, 3, requires_grad=True)]
        options = {"scale": 2.0}
        spec = RegularizerSpec(through, 0.5, "n", needs=("logits",), options=options, **how)
        loss = CompositeLoss(reads(nll, "data", "logprobs"), [spec])
        value = loss(data=[], logprobs=leaves, logits=logits)
        return value.item(), list(torch.autograd.grad(value, [*leaves, *logits]))

    value, expected = total()
    assert expected[-1].tolist() == [[2.0] * 3] * 2
    for how in ({"run_in": "thread"}, {"timeout": 9.0}):
        found, pulls = total(**how)
        assert found == pytest.approx(value, rel=1e-6)
        torch.testing.assert_close(pulls, expected)
    spec = RegularizerSpec(through, 0.5, "n", needs=("logits",), options={"scale": 1.0})
    with pytest.raises(InputError, match="'n' reads the input 'logits', which is not there"):
        CompositeLoss(reads(nll, "data", "logprobs"), [spec])(data=[], logprobs=LOGPROBS)


def test_what_nobody_can_differentiate_is_not() -> None:
    specs = [RegularizerSpec(l2, 0.1, "l2", gradient="numerical")]
    loss = CompositeLoss(reads(nll, "data", "logprobs"), specs)
    with listening("steelyard.custom_loss.gradient") as heard:
        total = loss(data=[], logprobs=LOGPROBS)
    assert (total.requires_grad, heard) == (False, [])


def test_double_values_stay_double() -> None:
    x = torch.tensor([0.1], dtype=torch.float64, requires_grad=True)
    loss = CompositeLoss(
        lambda x: x.sum(), [term(lambda x: x.square().sum(), 1.0, "t", run_in="thread")]
    )
    assert loss(x=x).item() == pytest.approx(0.11, rel=1e-15)


def test_an_autograd_term_that_reads_nothing_with_a_gradient() -> None:
    def constant(labels: Tensor) -> Tensor:
        return labels.float().mean()

    spec = term(constant, 1.0, "c", gradient="autograd", run_in="thread", on_error="skip")
    loss, *_ = totals([spec])
    assert loss.output.skipped["c"].startswith("GradientError: gradient='autograd' needs a loss")
    with pytest.raises(GradientError, match="regularizer 'c'"):
        totals([term(constant, 1.0, "c", gradient="autograd", run_in="thread")])


# Executors.


class Apart(Executor):
    """A place of its own: it runs each ticket in a thread, and notes what it is asked."""

    limited = False

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def submit(self, ticket: Ticket) -> None:
        self.asked.append(("submit", ticket.term, ticket.timeout))
        threading.Thread(target=ticket.run).start()

    def prepare(self, term: str, call: object) -> None:
        self.asked.append(("prepare", term))

    def close(self) -> None:
        self.asked.append(("close",))


def test_terms_run_on_whatever_executor_the_workers_have() -> None:
    mine = Apart()
    with Workers() as workers:
        workers._executors["thread"] = mine
        spec = RegularizerSpec(l2, 0.5, "t", run_in="thread", timeout=5.0)
        found = Pipeline(nll, [spec], workers=workers).compute([], LOGPROBS)
        loss = CompositeLoss(reads(nll, "data", "logprobs"), [spec], workers=workers)
        total = loss(data=[], logprobs=[each.clone().requires_grad_() for each in LOGPROBS])
    assert found.loss_total == pytest.approx(total.item())
    here = Pipeline(nll, [replace(spec, run_in="inline", timeout=None)]).compute([], LOGPROBS)
    assert found.loss_total == here.loss_total
    seen = [("prepare", "t"), ("submit", "t", 5.0)]
    assert mine.asked == [*seen, *seen, ("close",)]


def test_what_an_executor_gives_comes_to_the_device_of_the_inputs() -> None:
    layout, flat = flatten(torch.zeros(2))
    call = IsolatedCall("t", l2, {}, "auto", [], layout, flat.to("meta"))
    given = ValueAndGradient(
        1.0, {}, torch.ones(2), "autograd", 1.0, 1.0, {"logits": [torch.ones(1)]}
    )
    ticket = Ticket("t", "process", lambda: given, ())
    ticket.run()
    result = TermResult(Term(RegularizerSpec(l2, 1.0, "t")), 1.0)
    found = Job(result, call, Apart(), [ticket]).evaluation(ticket)
    assert found.gradient is not None
    assert found.gradient.device.type == "meta"
    (gradient,) = found.extra["logits"]
    assert gradient is not None
    assert gradient.device.type == "meta"


class Ticker:
    """Counts its calls, without state_dict."""

    def __init__(self) -> None:
        self.calls = 0

    def compute(self, data: Any, logprobs: list[Tensor]) -> Tensor:
        self.calls += 1
        return logprobs[0].sum() * self.calls

    def over(self, logits: Tensor) -> Tensor:
        self.calls += 1
        return logits.sum()


def test_state_that_is_lost_in_a_process_is_told_once() -> None:
    pipeline = Pipeline(nll, [RegularizerSpec(Ticker(), 1.0, "ticker", run_in="process")])
    with pytest.warns(LostStateWarning, match="'ticker' with run_in='process'.*changed 'calls'"):
        pipeline.compute([], LOGPROBS)
    for _ in range(3):
        pipeline.compute([], LOGPROBS)
    with pytest.warns(LostStateWarning, match="'calls'"):
        totals([term(Ticker().over, 0.1, "over", run_in="process")])
