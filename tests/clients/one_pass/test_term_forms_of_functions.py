from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tinker import types

from steelyard import Pipeline, RegularizerSpec
from steelyard.clients.one_pass.loss_graph import UnsuitableTermError
from steelyard.clients.one_pass.term_forms import FunctionTraces, hash_key
from steelyard.composition.per_datum import PerDatum

from .batches import LENGTHS, batch

DATA = batch()
SHAPES = [torch.Size([length]) for length in LENGTHS]
LOGPROBS = [torch.linspace(-5.0, -1.0, length) for length in LENGTHS]


def form_of(fn: Any, traces: FunctionTraces | None = None, data: Any = DATA) -> PerDatum:
    spec = RegularizerSpec(fn, weight=1.0, name="mine")
    (_, term) = Pipeline(lambda _, rows: rows[0].sum(), [spec]).due()
    form, _ = (traces or FunctionTraces()).form_of(term, data, SHAPES[: len(data)])
    return form


def value_of(form: PerDatum, metric: Any = None) -> float:
    """Value of a form on real log-probs, as the server and the client compute it."""
    values: Any
    reduction: Any
    values, reduction = metric or (form.values, form.reduction)
    total = 0.0
    for index, row in enumerate(LOGPROBS):
        fields: Any = {name: tensors[index] for name, tensors in form.fields.items()}  # type: ignore[index]
        total += values(row, **fields).sum().item()
    by: dict[Any, float] = {"sum": 1.0, "mean": float(len(DATA))}
    return total / float(by.get(reduction, reduction))


def weighted(data: Any, rows: Any) -> Any:
    pairs = zip(data, rows, strict=True)
    return -sum((row * d.loss_fn_inputs["weights"].to_torch()).sum() for d, row in pairs)


def ratios(data: Any, rows: Any) -> Any:
    """It reads a field that is called as the first argument of a form."""
    sampled = [d.loss_fn_inputs["logprobs"].to_torch() for d in data]
    return (torch.cat(rows) - torch.cat(sampled)).exp().mean()


def with_metrics(data: Any, rows: Any) -> Any:
    loss = torch.stack([row.square().mean() for row in rows]).mean()
    tokens = float(len(data))
    return loss, {"loss": loss.item(), "total": torch.cat(rows).sum().detach(), "data": tokens}


@pytest.mark.parametrize("fn", [weighted, ratios, with_metrics])
def test_the_form_gives_what_the_function_gives(fn: Any) -> None:
    returned = fn(DATA, LOGPROBS)
    loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
    form = form_of(fn)
    assert value_of(form) == pytest.approx(float(loss), rel=1e-6)
    assert form.metrics.keys() == metrics.keys()


def test_metrics_are_numbers_or_sums() -> None:
    form = form_of(with_metrics)
    assert form.metrics["data"] == 4.0
    expected = torch.cat(LOGPROBS).sum().item()
    assert value_of(form, form.metrics["total"]) == pytest.approx(expected, rel=1e-6)


def absent(data: Any, rows: Any) -> Any:
    scale = 2.0 if data[0].loss_fn_inputs.get("nothing") is None else 1.0
    return scale * torch.cat(rows).sum()


def test_a_field_that_no_datum_has_is_absent() -> None:
    assert value_of(form_of(absent)) == pytest.approx(2 * torch.cat(LOGPROBS).sum().item())


OTHERS: dict[str, tuple[Any, str]] = {
    "square of the mean": (lambda _, rows: torch.cat(rows).mean().square(), "for its square"),
    "branch": (lambda _, rows: rows[0].sum() if rows[0].sum() > 0 else 0.0, "traced"),
    "a tensor": (lambda _, rows: (rows[0] * torch.ones(9)).sum(), "a tensor that is not among"),
    "tokens": (lambda data, rows: data[0].model_input.length * rows[0].sum(), "'model_input'"),
    "a number": (lambda _, rows: float(rows[0].sum()), "cannot be traced"),
    "no log-probs": (lambda _, rows: 3.0, "does not depend on the log-probs"),
    "an item": (lambda _, rows: torch.cat(rows).sum() * rows[0].sum().item(), r"\.item\(\)"),
    "all fields": (lambda data, rows: len(data[0].loss_fn_inputs) * rows[0].sum(), "the fields"),
    "each field": (lambda data, rows: sum(data[0].loss_fn_inputs), "all fields of a datum"),
    "a constant added": (lambda _, rows: sum(r.sum() for r in rows) + 3.0, "neither the sum"),
    "weighted mean": (
        lambda data, rows: (
            weighted(data, rows) / sum(d.loss_fn_inputs["weights"].to_torch().sum() for d in data)
        ),
        "it is no sum over data, for its div",
    ),
    "another metric": (
        lambda _, rows: (torch.cat(rows).sum(), {"m": torch.cat(rows).sum() + 1}),
        "the metric 'm' is neither",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_lowered_says_why(name: str) -> None:
    fn, reason = OTHERS[name]
    with pytest.raises(UnsuitableTermError, match=reason):
        form_of(fn)


def test_a_field_that_only_some_data_have_is_refused() -> None:
    data = [*batch(lengths=LENGTHS[:1]), *batch(lengths=LENGTHS[1:2], weights=False)]
    with pytest.raises(UnsuitableTermError, match="'weights', which only some of the data have"):
        form_of(weighted, data=data)


def test_a_function_that_failed_is_not_called_again() -> None:
    calls = []

    def judge(_: Any, rows: Any) -> float:
        calls.append(rows)
        return float(rows[0].sum())

    traces = FunctionTraces()
    for _ in range(3):
        with pytest.raises(UnsuitableTermError, match="cannot be traced"):
            form_of(judge, traces)
    assert len(calls) == 1


def test_a_changed_constant_is_seen() -> None:
    scale = [2.0]

    def scaled(_: Any, rows: Any) -> Any:
        return scale[0] * torch.cat(rows).sum()

    traces, total = FunctionTraces(), torch.cat(LOGPROBS).sum().item()
    assert value_of(form_of(scaled, traces)) == pytest.approx(2 * total)
    scale[0] = 3.0
    assert value_of(form_of(scaled, traces)) == pytest.approx(3 * total)


def test_operations_that_change_at_every_step_are_not_followed() -> None:
    step = [0]

    def drifting(_: Any, rows: Any) -> Any:
        return step[0] * torch.cat(rows).sum()

    traces = FunctionTraces()
    for step[0] in range(1, 9):
        form_of(drifting, traces)
    step[0] = 9
    with pytest.raises(UnsuitableTermError, match="its operations change from step to step"):
        form_of(drifting, traces)


def test_many_batch_sizes_are_followed() -> None:
    traces = FunctionTraces()
    for count in range(2, 12):
        data = batch(lengths=[3 + index % 2 for index in range(count)])
        shapes = [torch.Size([d.model_input.length]) for d in data]
        spec = RegularizerSpec(ratios, weight=1.0, name="mine")
        (_, term) = Pipeline(lambda _, rows: rows[0].sum(), [spec]).due()
        form, _ = traces.form_of(term, data, shapes)
        assert form.reduction == sum(shape.numel() for shape in shapes)


@pytest.mark.parametrize("scale", [1e-7, 1.0])
def test_a_mean_over_values_is_told_from_one_over_data(scale: float) -> None:
    """With data of equal sizes both are the same; the next batch may have others."""

    def mean(_: Any, rows: Any) -> Any:
        return scale * torch.cat(rows).square().mean()

    traces = FunctionTraces()
    equal = batch(lengths=[LENGTHS[0]] * len(LENGTHS))
    shapes = [torch.Size([LENGTHS[0]])] * len(LENGTHS)
    spec = RegularizerSpec(mean, weight=1.0, name="mine")
    (_, term) = Pipeline(lambda _, rows: rows[0].sum(), [spec]).due()
    traces.form_of(term, equal, shapes)
    expected = scale * torch.cat(LOGPROBS).square().mean().item()
    assert value_of(form_of(mean, traces)) == pytest.approx(expected, rel=1e-6)


def test_a_mean_by_weights_is_refused_also_where_all_weights_are_equal() -> None:
    """On such a batch it is a mean over values; on the next one it may not be."""
    data = batch(weights=False)
    for datum, length in zip(data, LENGTHS, strict=True):
        datum.loss_fn_inputs["weights"] = types.TensorData.from_torch(torch.ones(length))
    fn, reason = OTHERS["weighted mean"]
    with pytest.raises(UnsuitableTermError, match=reason):
        form_of(fn, data=data)


def test_a_batch_that_does_not_tell_a_sum_from_a_mean_takes_two_passes_and_the_next_one() -> None:
    threshold = [-100.0]

    def hinge(_: Any, rows: Any) -> Any:
        return sum((threshold[0] - row).clamp_min(0).sum() for row in rows) / len(rows)

    traces = FunctionTraces()
    with pytest.raises(UnsuitableTermError, match="could be a sum or a mean over the data"):
        form_of(hinge, traces)  # 0 on random log-probs
    threshold[0] = -2.0
    expected = hinge(None, LOGPROBS).item()
    assert value_of(form_of(hinge, traces)) == pytest.approx(expected, rel=1e-6)


def test_functions_with_the_same_operations_have_keys_of_their_own() -> None:
    """Both divide by 2 when they are traced, one of them because there are two data."""

    def key(fn: Any) -> Any:
        spec = RegularizerSpec(fn, weight=1.0, name="mine")
        (_, term) = Pipeline(lambda _, rows: rows[0].sum(), [spec]).due()
        return FunctionTraces().form_of(term, DATA, SHAPES)[1]

    by_count = key(lambda data, rows: sum(row.sum() for row in rows) / len(data))
    by_two = key(lambda data, rows: sum(row.sum() for row in rows) / 2)
    assert by_count != by_two
    one, other = (
        key(lambda _, rows, name=name: (torch.cat(rows).sum(), {name: torch.cat(rows).mean()}))
        for name in ("one", "other")
    )
    assert one != other


@pytest.mark.parametrize(
    "draw", [random.random, np.random.rand, lambda: torch.rand(()).item()], ids=["py", "np", "pt"]
)
def test_a_function_that_draws_numbers_is_not_traced(draw: Any) -> None:
    """Its numbers would be constants, and a resumed run would draw others than a whole one."""

    def noisy(_: Any, rows: Any) -> Any:
        return draw() * torch.cat(rows).sum()

    states = random.getstate(), str(np.random.get_state()), torch.get_rng_state()  # noqa: NPY002
    with pytest.raises(UnsuitableTermError, match="it draws random numbers"):
        form_of(noisy)
    assert random.getstate() == states[0]
    assert str(np.random.get_state()) == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


def test_keys_are_by_value_where_there_is_a_hash() -> None:
    fn, unhashable = object().__str__, [1]
    assert hash_key(fn) == fn
    assert hash_key(unhashable) == hash_key(unhashable) != hash_key([1])
    assert hash(hash_key(unhashable)) == hash(hash_key(unhashable))
