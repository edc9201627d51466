from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from steelyard.composition.aggregate import Aggregator
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term

from .models import Net, activity, batch, confidence, cross_entropy, gradients

# Torch's compiler looks at .grad of every tensor, and hides the warning only where it is none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # in inductor
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def composite(**settings: Any) -> CompositeLoss:
    terms = [
        term(activity, lambda step: 0.1 * step, "activity"),
        term(confidence, 0.25, "confidence"),
        term(confidence, 1.0, "held", gradient="none"),
        term(confidence, 1.0, "off", enabled=False),
    ]
    return CompositeLoss(cross_entropy, terms, aux={"balance": 0.5}, **settings)


def step_of(model: Net, loss: CompositeLoss) -> Any:
    def step(x: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = loss(model(x), labels=labels)
        return total

    loss.watch(model)
    return step


def test_a_compiled_step_is_one_graph_for_all_steps() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model, eager = Net(), Net()
    ours, theirs = composite(), composite()
    compiled = torch.compile(step_of(model, ours), fullgraph=True, backend=counter)
    plain = step_of(eager, theirs)
    for number in range(3):
        x, labels = batch(number)
        for loss, run, net in ((ours, compiled, model), (theirs, plain, eager)):
            loss.step = number
            loss.share = torch.tensor(1.0 - 0.25 * number)
            net.zero_grad()
            run(x, labels).backward()
        torch.testing.assert_close(gradients(model), gradients(eager), rtol=1e-5, atol=1e-7)
        mine, wanted = ours.output, theirs.output
        assert mine.loss_total == pytest.approx(wanted.loss_total, rel=1e-6)
        assert mine.not_run == wanted.not_run == ("off",)
        assert list(mine.regularizers) == ["activity", "confidence", "held", "balance"]
        for name, each in mine.regularizers.items():
            expected = wanted.regularizers[name]
            assert each.value == pytest.approx(expected.value, rel=1e-5)
            assert each.weight == pytest.approx(expected.weight, rel=1e-6)
            assert each.custom == pytest.approx(expected.custom, rel=1e-6)
    assert counter.frame_count == 1
    # No number keeps the graph of its pass alive.
    for reading in ours.results:
        assert reading.value is not None
        assert not reading.value.requires_grad
        assert not any(value.requires_grad for value in reading.custom.values())


def test_generated_code_gives_the_same() -> None:
    # The gradients are tested above: each piece of generated code takes a C++ compiler seconds.
    x = torch.linspace(-1, 1, 8)
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda x: x.square().sum(), float, "t")])
    quick: Any = {"cpp.simdlen": 1, "cpp_cache_precompile_headers": False}
    compiled = torch.compile(loss, fullgraph=True, options=quick)
    for step in range(3):
        loss.step = step
        expected = x.sum() + step * x.square().sum()
        assert compiled(x=x).item() == pytest.approx(expected.item(), abs=1e-6)
        assert loss.output.regularizers["t"].weight == step


def test_the_composite_alone_compiled() -> None:
    loss = composite()
    loss.step = 3
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    model, (x, labels) = Net(), batch()
    out, aux = model(x), {"balance": torch.tensor(2.0, requires_grad=True)}
    total = compiled(out, labels=labels, aux=aux)
    assert torch.equal(total, loss(out, labels=labels, aux=aux))
    assert loss.output.regularizers["balance"].contribution == 1.0
    changes: list[Callable[[], None]] = [
        lambda: loss.set_weight("confidence", 0.75),
        lambda: loss.set_enabled("off", True),
        lambda: loss.remove("activity"),
        lambda: loss.add(term(activity, 0.125, "more")),
    ]
    for change in changes:
        change()
        changed = compiled(out, labels=labels, aux=aux)
        assert changed.item() != total.item()
        total = changed
        assert torch.equal(total, loss(out, labels=labels, aux=aux))


@pytest.mark.parametrize("what", ["apart", "norms", "bound"])
def test_what_a_compiler_cannot_see_breaks_the_graph_and_is_right(what: str) -> None:
    apart = {"run_in": "thread"} if what == "apart" else {}

    def build() -> CompositeLoss:
        terms = [term(activity, 0.5, "activity", **apart), term(confidence, 0.25, "confidence")]
        if what == "bound":
            terms[0] = replace(terms[0], weight=None, at_most=0.01)
        loss = CompositeLoss(cross_entropy, terms, track_grad_norms=what == "norms")
        loss.step = 0  # a compiled call does not count
        return loss

    counter = CompileCounter()
    model, loss, expected = Net(), build(), build()
    x, labels = batch()

    def step(composite: CompositeLoss) -> Tensor:
        logits, hidden = model.outer((h := model.inner(x).tanh()) * 1), h
        total: Tensor = composite(logits=logits, hidden=hidden, labels=labels) * 1
        return total

    torch.compile(step, backend=counter)(loss).backward()  # type: ignore[no-untyped-call]
    found = gradients(model)
    model.zero_grad()
    step(expected).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, gradients(model))
    assert counter.frame_count >= 2
    mine, theirs = loss.output, expected.output
    assert mine.loss_total == pytest.approx(theirs.loss_total)
    assert mine.regularizers["activity"].grad_norm == (
        pytest.approx(theirs.regularizers["activity"].grad_norm) if what == "norms" else None
    )


def test_an_input_that_is_not_there() -> None:
    loss = composite()
    loss.step = 0
    compiled = torch.compile(loss, backend="eager")
    with pytest.raises(Exception, match="reads the input 'labels', which is not there"):
        compiled(logits=torch.ones(1, 3))


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_what_a_compiler_traces_is_the_plain_call(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terms_of(hidden: Tensor) -> tuple[Tensor, None]:
        return hidden.mean().reshape(1), None

    model, (x, labels) = Net(), batch()
    loss = composite()
    loss.add(term(terms_of, 0.5, "none"))
    loss.step, loss.share = 2, share
    loss.watch(model)
    plain = loss(model(x), labels=labels)
    wanted = loss.output
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    traced = loss(model(x), labels=labels)
    monkeypatch.undo()
    torch.testing.assert_close(traced, plain)
    found = loss.output
    assert found.not_run == wanted.not_run == ("off",)
    assert found.base_loss.value == pytest.approx(wanted.base_loss.value)
    assert list(found.regularizers) == list(wanted.regularizers)
    for name, each in found.regularizers.items():
        other = wanted.regularizers[name]
        assert each.contribution == pytest.approx(other.contribution)
        assert each.custom == pytest.approx(other.custom)
    assert not any(each.value.requires_grad for each in loss.results if each.value is not None)


def test_what_a_compiler_cannot_see_is_the_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, labels) = Net(), batch()
    loss = composite(track_grad_norms=True)
    loss.step = 0
    loss.watch(model)
    plain = loss(model(x), labels=labels)
    wanted = loss.output
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(loss(model(x), labels=labels), plain)
    monkeypatch.undo()
    assert loss.output.total_grad_norm == wanted.total_grad_norm is not None


def test_an_aggregator_breaks_the_graph_and_has_its_say() -> None:
    class Halved(Aggregator):
        def factors(self, values: Any, weights: Any, products: Any) -> Sequence[float]:
            return [1.0, 0.5]

    x = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = CompositeLoss(
        lambda x: 3 * x.sum(),
        [term(lambda x: x.square().sum(), 1.0, "square")],
        aggregate=Halved(),
    )
    total = torch.compile(lambda x: loss(x=x) * 1, backend="eager")(x)
    assert total.item() == 9.0 + 5.0
    total.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0 + 0.5 * 2.0, 3.0 + 0.5 * 4.0]
