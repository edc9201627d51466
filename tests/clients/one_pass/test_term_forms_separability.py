from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from steelyard.clients.one_pass.term_forms import mixing_operation, operation_name
from steelyard.clients.one_pass.torch_operations import SymbolTracer


def mixing(fn: Callable[[list[Any], list[Any]], Any]) -> str | None:
    """The operation that mixes two data in a function of their log-probs and their weights."""
    graph = fx.Graph()
    tracer = SymbolTracer(graph)
    weights = [tracer.symbol(f"field_{index}_w") for index in range(2)]
    logprobs = [tracer.symbol(f"logprobs_{index}") for index in range(2)]
    return mixing_operation(graph, [fn(logprobs, weights).node])


SUMS: dict[str, Any] = {
    "of rows": lambda rows, _: sum(row.square().sum() for row in rows),
    "less another": lambda rows, _: rows[0].sum() - rows[1].exp().sum(),
    "of all tokens": lambda rows, _: torch.cat(rows).exp().mean(),
    "of all tokens times weights": lambda rows, w: -(torch.cat(rows) * torch.cat(w)).sum(),
    "mean of means": lambda rows, _: torch.stack([row.mean() for row in rows]).mean(),
    "scaled": lambda rows, _: -0.5 * (rows[0].sum() + rows[1].sum()) / len(rows),
    "in float64": lambda rows, _: (rows[0].sum() + rows[1].sum()).double(),
    "with a constant": lambda rows, _: torch.cat([(row - row.mean()) for row in rows]).sum(),
}
OTHERS: dict[str, tuple[Any, str]] = {
    "square of a sum": (lambda rows, _: torch.cat(rows).mean().square(), "square"),
    "hinge of a sum": (lambda rows, _: (rows[0].sum() + rows[1].sum()).clamp_min(0), "clamp_min"),
    "product": (lambda rows, _: rows[0].sum() * rows[1].sum(), "mul"),
    "centred": (lambda rows, _: (torch.cat(rows) - torch.cat(rows).mean()).abs().sum(), "sub"),
    "one datum": (lambda rows, _: rows[0].sum(), "sum"),
    "softmax over data": (lambda rows, _: torch.stack(rows).softmax(0).sum(), "softmax"),
    "ratio": (lambda rows, _: torch.cat(rows).sum() / torch.cat(rows).exp().sum(), "div"),
    "divided by all weights": (lambda rows, w: torch.cat(rows).sum() / torch.cat(w).sum(), "div"),
    "shares of all weights": (
        lambda rows, w: sum((rows[i] * (w[i] / (w[0].sum() + w[1].sum()))).sum() for i in (0, 1)),
        "div",
    ),
    "weights of another datum": (lambda rows, w: sum((row * w[0]).sum() for row in rows), "mul"),
    "divided by a sum": (lambda rows, w: w[0].sum() / torch.cat(rows).sum(), "div"),
    "sum over a dimension": (lambda rows, _: torch.stack(rows).sum(0).exp().sum(), "sum"),
    "not added": (lambda rows, _: torch.cat(rows), "cat"),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_data_mixes_nothing(name: str) -> None:
    assert mixing(SUMS[name]) is None


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_sum_is_named(name: str) -> None:
    fn, operation = OTHERS[name]
    assert mixing(fn) == operation


def test_functions_methods_and_operators_have_one_name() -> None:
    graph = fx.Graph()
    x = SymbolTracer(graph).symbol("x")
    same = [x / 2, torch.div(x, 2), x.div(2), torch.true_divide(x, 2)]
    assert {operation_name(quotient.node) for quotient in same} == {"div"}
