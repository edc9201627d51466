from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from steelyard.clients.one_pass import torch_operations
from steelyard.clients.one_pass.loss_graph import (
    GraphTerm,
    LossGraph,
    UnsuitableTermError,
    build_graph,
)
from steelyard.composition.per_datum import PerDatum

BASE = GraphTerm("base", PerDatum(lambda logprobs: -logprobs, all_tokens=True), {})
SQUARE = GraphTerm("square", PerDatum(lambda logprobs: logprobs.square()), {})
RANKS = {"logprobs": 1, "mask": 1}
LOGPROBS, MASK = torch.tensor([-1.0, -2.0, -5.0]), torch.tensor([1.0, 0.0, 1.0])


def run(
    graph: LossGraph, factors: tuple[float, ...], **fields: torch.Tensor
) -> tuple[Any, Any, dict[str, float]]:
    """Loss, gradient and metrics of the graph for one datum."""
    leaf = LOGPROBS.clone().requires_grad_()
    numbers = {f"factor_{i}": torch.tensor(each) for i, each in enumerate(factors)}
    loss, metrics = fx.GraphModule({}, graph.graph)(logprobs=leaf, mask=MASK, **fields, **numbers)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss, gradient, {key: float(value) for key, value in metrics.items()}


@pytest.mark.parametrize("tracked", [False, True])
def test_the_loss_and_its_gradient_are_the_weighted_sums(tracked: bool) -> None:
    graph = build_graph([BASE, SQUARE], RANKS, tracked=tracked)
    loss, gradient, metrics = run(graph, (1.0, 0.5))
    # By hand: 8 + ½ (1 + 25), and -1 + lp for the tokens that count.
    assert loss.item() == 21.0
    assert gradient.tolist() == [-2.0, -1.0, -6.0]
    assert metrics["custom/v/0:sum"] == 8.0
    assert metrics["custom/v/1:sum"] == 26.0
    assert graph.metric_keys == metrics.keys()


def test_tracked_metrics_are_the_inner_products() -> None:
    _, _, metrics = run(build_graph([BASE, SQUARE], RANKS, tracked=True), (1.0, 0.5))
    # The gradients are (-1, -1, -1) and (-2, 0, -10), their total (-2, -1, -6).
    assert [metrics[f"custom/g/{pair}:sum"] for pair in ("0.0", "0.1", "1.1")] == [3, 12, 104]
    assert metrics["custom/n:sum"] == 41.0


def test_a_surrogate_is_differentiated_in_place_of_the_value() -> None:
    form = PerDatum(lambda logprobs: -logprobs, gradient_of=lambda logprobs: logprobs.exp())
    graph = build_graph([BASE, GraphTerm("x", form, {})], RANKS, tracked=True)
    _, gradient, metrics = run(graph, (0.0, 1.0))
    assert metrics["custom/v/1:sum"] == 6.0
    torch.testing.assert_close(gradient, LOGPROBS.exp() * MASK)


def test_own_metrics_share_the_operations_of_the_value() -> None:
    def each(logprobs: Any) -> Any:
        return logprobs.exp().square()

    plain = build_graph([BASE, GraphTerm("x", PerDatum(each), {})], RANKS, tracked=False)
    form = PerDatum(each, metrics={"same": (each, "sum"), "constant": 3.0})
    more = build_graph([BASE, GraphTerm("x", form, {})], RANKS, tracked=False)
    assert len(list(more.graph.nodes)) == len(list(plain.graph.nodes))
    assert more.terms[1].metrics == {"same": ("custom/m/1.0:sum", 1)}


def test_a_gradient_that_is_not_finite_makes_the_loss_nan() -> None:
    """A server refuses a NaN, and would accumulate an infinite gradient."""
    root = GraphTerm("root", PerDatum(lambda logprobs, x: (logprobs * x).sqrt()), {"x": "x"})
    graph = build_graph([BASE, root], {**RANKS, "x": 0}, tracked=False)
    loss, _, metrics = run(graph, (1.0, 1.0), x=torch.tensor(-0.0))
    assert metrics["custom/v/1:sum"] == 0.0
    assert loss.isnan()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (lambda logprobs: logprobs[::2].sum(), "a slice with a step has no derivative here"),
        (lambda logprobs: logprobs.sort().values, "sort is not an operation"),
        (lambda logprobs: 3.0, "its values must be one number, or have the shape"),
        (lambda logprobs: logprobs[1:], "its values must be one number, or have the shape"),
        (lambda logprobs: logprobs if logprobs.sum() > 0 else -logprobs, "it cannot be traced"),
        (lambda logprobs: logprobs.detach().exp(), "it does not depend on the log-probs"),
        (lambda logprobs: logprobs * torch.ones(5), "it cannot be traced: it uses a tensor"),
    ],
)
@pytest.mark.parametrize("tracked", [False, True])
def test_a_term_that_does_not_fit_is_named(values: Any, reason: str, tracked: bool) -> None:
    term = GraphTerm("odd", PerDatum(values), {})
    with pytest.raises(UnsuitableTermError, match=reason) as caught:
        build_graph([BASE, SQUARE, term], RANKS, tracked=tracked)
    assert caught.value.term == "odd"


def translate_wrongly(
    monkeypatch: pytest.MonkeyPatch, operation: str, wrong: Callable[[Any], Any]
) -> None:
    translate = torch_operations._translate

    def changed(target: Any, *rest: Any) -> Any:
        result = translate(target, *rest)
        return wrong(result) if str(target) == operation else result

    monkeypatch.setattr(torch_operations, "_translate", changed)


def test_a_graph_that_fails_on_the_sample_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A term that nobody foresaw must cost one pass, not the call."""
    translate_wrongly(monkeypatch, "aten.pow.Tensor_Scalar", lambda x: x[:3] + x[:2])
    with pytest.raises(UnsuitableTermError, match="The size of tensor a") as caught:
        build_graph([BASE, SQUARE], RANKS, tracked=False)
    assert caught.value.term == "square"


def test_a_graph_is_compared_with_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a translation were wrong, the graph would not be used."""
    translate_wrongly(monkeypatch, "aten.expand.default", lambda x: x * 2)
    with pytest.raises(UnsuitableTermError, match="gradient differs from that of autograd"):
        build_graph([BASE], RANKS, tracked=False)
