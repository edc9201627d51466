from __future__ import annotations

from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard.engine.server.uploaded_loss.budget import LossBudget
from steelyard.engine.server.uploaded_loss.interpreter import (
    ALONE,
    TracedLoss,
    group_by_shape,
    run_alone,
    run_together,
)
from steelyard.engine.server.uploaded_loss.operations import FUNCTIONS, METHODS
from steelyard.engine.server.uploaded_loss.validate import validate_loss
from steelyard.errors import InputError
from tests.engine.data import datum, ragged

from .graphs import LOGPROBS, X, call, upload

INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
WEIGHTS = {"op": "placeholder", "name": "weights", "target": "weights"}


def rows(*lengths: int) -> list[list[torch.Tensor]]:
    return [[torch.rand(n) * -5, torch.rand(n)] for n in lengths]


def evaluate(inputs: Any) -> Any:
    logprobs, weights = inputs
    centred = logprobs - logprobs.mean()
    loss = (centred.square() * weights).sum()
    return loss, {"custom/a:sum": logprobs.exp().sum(), "custom/n:mean": logprobs.numel()}


def test_data_are_grouped_by_shape() -> None:
    inputs = rows(3, 5, 3, 3, 5)
    assert group_by_shape(inputs, lambda _: 9) == [[0, 2, 3], [1, 4]]
    assert group_by_shape(inputs, lambda _: 2) == [[0, 2], [3], [1, 4]]
    assert group_by_shape(inputs, lambda _: 1) == [[0], [2], [3], [1], [4]]


def test_data_that_run_together_have_the_results_of_those_that_run_alone() -> None:
    inputs = rows(4, 4, 4)
    together = run_together(evaluate, inputs)
    alone = [run_alone(evaluate, each) for each in inputs]
    torch.testing.assert_close(together.value, sum(each.value for each in alone))
    gradients = [each.gradients[0] for each in alone if each.gradients]
    torch.testing.assert_close(list(together.gradients or ()), gradients)
    for key, value in together.metrics.items():
        assert value == pytest.approx(sum(each.metrics[key] for each in alone))


def test_a_loss_that_is_constant_has_no_gradient() -> None:
    def constant(inputs: Any) -> Any:
        return inputs[1].sum(), {}

    assert run_together(constant, rows(2, 2)).gradients is None
    assert run_alone(constant, rows(2)[0]).gradients is None


def test_a_metric_must_be_a_number() -> None:
    def odd(inputs: Any) -> Any:
        return inputs[0].sum(), {"custom/a:sum": inputs[0]}

    with pytest.raises(InputError, match="the metric 'custom/a:sum' must be one number"):
        run_together(odd, rows(2, 2))
    with pytest.raises(InputError, match="the metric 'custom/a:sum' must be one number"):
        run_alone(odd, rows(2)[0])


def uploaded(*nodes: dict[str, Any]) -> TracedLoss:
    return validate_loss(upload(*nodes), max_nodes=64)


def run_counted(
    loss: TracedLoss, data: list[types.Datum], monkeypatch: pytest.MonkeyPatch
) -> tuple[float, int]:
    """Value of a batch, and how often the graph ran for it."""
    runs = []
    evaluated = TracedLoss.evaluate

    def evaluate(self: TracedLoss, *args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return evaluated(self, *args, **kwargs)

    monkeypatch.setattr(TracedLoss, "evaluate", evaluate)
    bound = loss.bind(data, LossBudget())
    bound.check()
    before = len(runs)
    generator = torch.Generator().manual_seed(0)
    lengths = [d.model_input.length for d in data]
    logprobs = [torch.rand(n, generator=generator).requires_grad_() for n in lengths]
    value, _ = bound(logprobs)
    return value.item(), len(runs) - before


def test_equal_shapes_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = uploaded(call("torch.exp", LOGPROBS), call("torch.sum", X, name="y"))
    value, runs = run_counted(loss, ragged(0, [5, 3, 5, 5]), monkeypatch)
    assert runs == 2
    generator = torch.Generator().manual_seed(0)
    each = [torch.rand(n, generator=generator).exp().sum().item() for n in (5, 3, 5, 5)]
    assert value == pytest.approx(sum(each))


def test_what_cannot_be_batched_runs_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    positive = call("torch.gt", LOGPROBS, 0.5)
    chosen = call("torch.where", X, LOGPROBS, 0.0, name="y")
    # The size of a selection depends on values: vmap refuses it.
    selected = call("masked_select", LOGPROBS, X, op="call_method", name="y")
    total = call("torch.sum", {"ref": "y"}, name="z")
    data = [datum([1, 2, 3]), datum([4, 5, 6])]
    expected, together = run_counted(uploaded(positive, chosen, total), data, monkeypatch)
    loss = uploaded(positive, selected, total)
    value, _ = run_counted(loss, data, monkeypatch)
    assert together == 1
    assert value == pytest.approx(expected)


def test_a_check_of_values_is_not_left_out() -> None:
    """Under vmap torch does not look whether the quantiles are from 0 to 1."""
    loss = uploaded(call("torch.quantile", LOGPROBS, 2.5), call("torch.sum", X, name="y"))
    bound = loss.bind([datum([1, 2, 3]), datum([4, 5, 6])])
    with pytest.raises(InputError, match=r"range \[0, 1\]"):
        bound([torch.rand(3).requires_grad_() for _ in range(2)])


def test_a_median_is_that_of_its_datum() -> None:
    """Under vmap torch takes the median of an expanded tensor over the whole batch."""
    nodes = [
        call("torch.sum", LOGPROBS, name="s"),
        call("expand", {"ref": "s"}, 3, op="call_method", name="x"),
        call("torch.median", X, name="y"),
    ]
    bound = uploaded(*nodes).bind([datum([1, 2]), datum([3, 4])])
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    value, _ = bound([row.requires_grad_() for row in rows])
    assert value.item() == 33.0


def prepared(name: str, row: Tensor) -> Tensor:
    """First argument of an operation, in a form that vmap might take for another."""
    match name:
        case "a number":
            return row.sum()
        case "expanded":
            return row.sum().expand(5)
        case "repeated":
            return row.expand(3, *row.shape)
        case "reversed":
            return row.flip(0)
    return row


@pytest.mark.parametrize("form", ["plain", "a number", "expanded", "repeated", "reversed"])
def test_operations_together_give_what_each_datum_gives(form: str) -> None:
    """Each operation of the allowlist that runs under vmap, whatever number follows."""
    generator = torch.Generator().manual_seed(0)
    compared = 0
    operations = {name: fn for name, fn in FUNCTIONS.items() if not name.startswith("math.")}
    operations.update({name: getattr(Tensor, name) for name in METHODS})
    for name, fn in operations.items():
        if name.rpartition(".")[2] in ALONE:
            continue
        for batch in (torch.randn(2, 4, generator=generator), torch.rand(2, 3, 3)):
            for args in ((), (0,), (-1,), (2,), (0, True), (0.5,)):

                def run(row: Tensor, fn: Any = fn, args: Any = args) -> tuple[Tensor, ...]:
                    result = fn(prepared(form, row), *args)
                    pieces = result if isinstance(result, tuple | list) else [result]
                    return tuple(torch.as_tensor(piece) for piece in pieces)

                try:
                    alone = [run(row) for row in batch]
                    together = torch.func.vmap(run)(batch)
                except Exception:  # noqa: BLE001 - it does not take these arguments
                    continue
                compared += 1
                for number, pieces in enumerate(alone):
                    for piece, column in zip(pieces, together, strict=True):
                        torch.testing.assert_close(
                            column[number], piece, equal_nan=True, msg=f"{name} of {form}, {args}"
                        )
    assert compared > 400
