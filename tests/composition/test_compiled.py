from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from steelyard.composition import CompositeLoss, term

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


@pytest.mark.parametrize("what", ["apart", "norms"])
def test_what_a_compiler_cannot_see_breaks_the_graph_and_is_right(what: str) -> None:
    apart = {"run_in": "thread"} if what == "apart" else {}

    def build() -> CompositeLoss:
        terms = [term(activity, 0.5, "activity", **apart), term(confidence, 0.25, "confidence")]
        return CompositeLoss(cross_entropy, terms, track_grad_norms=what == "norms")

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
    compiled = torch.compile(composite(), backend="eager")
    with pytest.raises(Exception, match="reads the input 'labels', which is not there"):
        compiled(logits=torch.ones(1, 3))
