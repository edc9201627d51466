"""How the terms' gradients become one: `combine`, and aggregators that decide the factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.aggregate import (
    AggregationWarning,
    Aggregator,
    WeightedSum,
    combine,
    read_numbers,
)
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.composition.terms import Term, TermResult
from steelyard.errors import AggregationError, SpecError
from steelyard.gradients.algebra import Row
from steelyard.penalties.from_logits import entropy, z_loss
from steelyard.regularizers import WholeVocabulary
from tests.fused import count_together

from .models import Net, activity, batch, confidence, cross_entropy, gradients
from .terms import LOGPROBS, broken, constant, l2, nll

SUM = WeightedSum()


def result(
    name: str, weight: float, gradients: Mapping[str, Row], *space: str, **fields: Any
) -> TermResult:
    spec = RegularizerSpec(l2, weight, name)
    return TermResult(
        Term(spec), weight, space=space or ("logprobs",), gradients=gradients, **fields
    )


def flat(name: str, weight: float, gradient: Tensor, **fields: Any) -> TermResult:
    return result(name, weight, {"logprobs": [gradient]}, **fields)


# Combining gradients.


def test_untracked_gives_the_same_total_and_nothing_else() -> None:
    results = [
        flat(name, weight, torch.randn(4))
        for name, weight in {"a": 1.0, "b": 0.5, "c": 0.0}.items()
    ]
    tracked = combine(results, SUM, "logprobs", tracked=True)
    plain = combine(results, SUM, "logprobs", tracked=False)
    torch.testing.assert_close(plain.totals, tracked.totals)
    assert plain.total_norm == pytest.approx(tracked.total_norm)
    assert (plain.norms, plain.cosines) == ({}, {})
    assert list(tracked.norms) == ["a", "b", "c"]
    assert list(tracked.cosines) == [("a", "b"), ("a", "c"), ("b", "c")]


def test_no_gradients() -> None:
    for results in ([], [result("a", 1.0, {})]):
        found = combine(results, SUM, "logprobs", tracked=True)
        assert (found.totals, found.total_norm, found.norms) == ({}, None, {})


def test_sums_in_each_space_and_norms_and_cosines_within_one() -> None:
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([[0.0], [4.0]])
    results = [
        result("one", 2.0, {"logits": [a, b]}, "logits"),
        result("two", 0.5, {"logits": [a, None]}, "logits"),
        result("wide", 1.0, {"logits": [a, None], "parameters": [b]}, "logits", "parameters"),
    ]
    found = combine(results, SUM, "logprobs", tracked=True)
    totals = {k: [g if g is None else g.tolist() for g in row] for k, row in found.totals.items()}
    assert totals == {"logits": [[10.5, 0.0], [[0.0], [8.0]]], "parameters": [[[0.0], [4.0]]]}
    assert found.norms == {"one": 5.0, "two": 3.0, "wide": 5.0}
    assert found.cosines == {("one", "two"): pytest.approx(9 / 15)}
    assert found.total_norm is None  # nothing in the main space


def test_a_gradient_outside_a_terms_own_space_counts_in_the_total_alone() -> None:
    a, x = torch.tensor([3.0, 4.0]), torch.tensor([1.0])
    results = [
        flat("a", 1.0, a),
        result("wide", 2.0, {"logprobs": [a], "logits": [x]}, "logits"),
    ]
    found = combine(results, SUM, "logprobs", tracked=True)
    (total,) = found.totals["logprobs"]
    assert total is not None
    assert total.tolist() == [9.0, 12.0]
    assert found.total_norm == 15.0
    assert (found.norms, found.cosines) == ({"a": 5.0, "wide": 1.0}, {})


# Aggregators.


class Halved(Aggregator):
    """Half of every term but the base loss."""

    def factors(
        self, values: Sequence[float], weights: Sequence[float], products: Any
    ) -> Sequence[float]:
        return [1.0, *(0.5 for _ in values[1:])]


class Noted(Halved):
    """The same, and what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[list[float], list[float], list[list[float]]]] = []

    def factors(
        self, values: Sequence[float], weights: Sequence[float], products: Any
    ) -> Sequence[float]:
        self.given.append((list(values), list(weights), [list(row) for row in products]))
        return super().factors(values, weights, products)


SPECS = [
    RegularizerSpec(l2, 0.1, "l2", run_in="inline"),
    RegularizerSpec(l2, 0.4, "apart", run_in="thread"),
]
FLAT = torch.cat(LOGPROBS)
BASE = -torch.full_like(FLAT, 1 / 6)
WEIGHTED = [BASE, 0.1 * 2 * FLAT, 0.4 * 2 * FLAT]


@pytest.mark.parametrize("tracked", [True, False])
def test_a_pipeline_puts_the_factors_on_the_gradients_and_not_on_the_values(tracked: bool) -> None:
    plain = Pipeline(nll, SPECS, track_grad_norms=True).compute([], LOGPROBS)
    pipeline = Pipeline(nll, SPECS, track_grad_norms=tracked, aggregate=Halved())
    output = pipeline.compute([], LOGPROBS)
    assert output.loss_total == plain.loss_total
    assert {n: r.contribution for n, r in output.regularizers.items()} == {
        n: r.contribution for n, r in plain.regularizers.items()
    }
    expected = WEIGHTED[0] + 0.5 * (WEIGHTED[1] + WEIGHTED[2])
    torch.testing.assert_close(torch.cat(list(output.gradients)), expected)
    if tracked:
        assert output.total_grad_norm == pytest.approx(expected.norm().item())
        assert output.cosines == plain.cosines
        for name, each in plain.regularizers.items():
            assert output.regularizers[name].grad_norm == each.grad_norm
    else:
        assert (output.total_grad_norm, output.cosines) == (None, {})
        assert output.regularizers["l2"].grad_norm is None


def test_an_aggregator_is_given_values_weights_and_the_gram_matrix_of_weighted_gradients() -> None:
    noted = Noted()
    output = Pipeline(nll, SPECS, aggregate=noted).compute([], LOGPROBS)
    ((values, weights, products),) = noted.given
    assert values == [output.base_loss.value, *(r.value for r in output.regularizers.values())]
    assert weights == [1.0, 0.1, 0.4]
    rows = torch.stack(WEIGHTED)
    torch.testing.assert_close(torch.tensor(products), rows @ rows.T)


def sums(_: Any, logprobs: Any, logits: Tensor) -> Tensor:
    return logits.sum()


def test_an_aggregator_does_not_see_anchors_nor_terms_without_a_gradient_or_a_weight() -> None:
    specs = [
        RegularizerSpec(constant, 1.0, "constant", gradient="none"),
        RegularizerSpec(broken, 1.0, "broken", on_error="skip"),
        RegularizerSpec(sums, 3.0, "elsewhere", needs=("logits",), anchor=True),
        RegularizerSpec(l2, 0.2, "anchored", anchor=True),
        RegularizerSpec(l2, 0.0, "off"),
        RegularizerSpec(l2, 0.1, "l2"),
    ]
    noted = Noted()
    pipeline = Pipeline(nll, specs, aggregate=noted, gives=("logits",))
    output = pipeline.compute([], LOGPROBS, given={"logits": torch.ones(2)})
    ((values, weights, products),) = noted.given
    assert (len(values), weights) == (2, [1.0, 0.1])
    rows = torch.stack(WEIGHTED[:2]).double()
    torch.testing.assert_close(torch.tensor(products, dtype=torch.float64), rows @ rows.T)
    expected = BASE + 0.5 * WEIGHTED[1] + 2 * WEIGHTED[1]
    torch.testing.assert_close(torch.cat(list(output.gradients)), expected)
    assert output.extra_gradients["logits"].tolist() == [3.0, 3.0]
    ones = dict.fromkeys(["base", "elsewhere", "anchored", "off"], 1.0)
    assert output.factors == {**ones, "l2": 0.5}


def test_gradients_of_different_spaces_cannot_be_compared() -> None:
    specs = [RegularizerSpec(sums, 3.0, "elsewhere", needs=("logits",))]
    pipeline = Pipeline(nll, specs, aggregate=Halved(), gives=("logits",))
    message = (
        "here logprobs, and the gradient of regularizer 'elsewhere' is with respect to logits: "
        "give it anchor=True, which exempts it, compare them with grad_space='parameters', or use "
        "aggregate='sum'."
    )
    with pytest.raises(SpecError, match=message):
        pipeline.compute([], LOGPROBS, given={"logits": torch.ones(2)})


@pytest.mark.parametrize("specs", [[], [RegularizerSpec(l2, 0.1, "l2", anchor=True)]])
def test_one_gradient_alone_takes_the_plain_sum(specs: list[RegularizerSpec]) -> None:
    noted = Noted()
    output = Pipeline(nll, specs, aggregate=noted).compute([], LOGPROBS)
    assert (noted.given, output.factors) == ([], {})


def test_the_sum_has_no_factors_to_report() -> None:
    output = Pipeline(nll, SPECS, track_grad_norms=True).compute([], LOGPROBS)
    assert output.factors == {}
    assert "factors" not in output.to_dict()


def test_factors_are_part_of_the_output_and_of_its_metrics() -> None:
    output = Pipeline(nll, SPECS, aggregate=Halved()).compute([], LOGPROBS)
    assert output.factors == {"base": 1.0, "l2": 0.5, "apart": 0.5}
    assert output.metrics["factors/apart"] == 0.5
    assert type(output).from_dict(output.to_dict()) == output


def test_a_step_without_factors_takes_the_plain_sum_and_is_named_in_a_warning() -> None:
    class Failing(Aggregator):
        def factors(self, values: Any, weights: Any, products: Any) -> Sequence[float]:
            raise AggregationError("no solution.")

    pipeline = Pipeline(nll, SPECS, aggregate=Failing())
    with pytest.warns(AggregationWarning, match="step 7 takes the plain sum .*: no solution"):
        output = pipeline.compute([], LOGPROBS, step=7)
    torch.testing.assert_close(torch.cat(list(output.gradients)), sum(WEIGHTED))
    assert output.factors == {}


def test_an_aggregator_with_state_is_saved_with_the_terms() -> None:
    class Counting(Halved):
        calls = 0

        def factors(self, values: Any, weights: Any, products: Any) -> Sequence[float]:
            self.calls += 1
            return super().factors(values, weights, products)

        def state_dict(self) -> dict[str, int]:
            return {"calls": self.calls}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.calls = state["calls"]

    first, second = (Pipeline(nll, SPECS, aggregate=Counting()) for _ in range(2))
    first.compute([], LOGPROBS)
    assert first.state_dict() == {"(aggregate)": {"calls": 1}, "(step)": 1}
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert Pipeline(nll, SPECS, aggregate=Halved()).state_dict() == {"(step)": 0}
    with pytest.raises(SpecError, match=r"'\(aggregate\)' is the aggregator: choose another"):
        Pipeline(nll, [RegularizerSpec(l2, 1.0, "(aggregate)")])


def composed(
    model: Net, *, aggregate: Any = "sum", **settings: Any
) -> tuple[CompositeLoss, Tensor]:
    x, labels = batch()
    terms = [
        term(activity, 0.5, "activity"),
        term(confidence, 0.25, "confidence", run_in="thread"),
    ]
    loss = CompositeLoss(cross_entropy, terms, aggregate=aggregate, **settings)
    total: Tensor = loss(model(x), labels=labels)
    return loss, total


@pytest.mark.parametrize("wrt", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_a_composite_has_the_value_of_the_sum_and_the_gradient_with_factors(
    tracked: bool, wrt: bool
) -> None:
    model, (x, labels) = Net(), batch()
    out = model(x)
    terms = [
        cross_entropy(out["logits"], labels),
        0.5 * activity(out["hidden"])[0],
        0.25 * confidence(out["logits"]),
    ]
    (terms[0] + 0.5 * (terms[1] + terms[2])).backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    model.zero_grad()
    settings = {"track_grad_norms": tracked, "wrt": model if wrt else None}
    loss, total = composed(model, aggregate=Halved(), **settings)
    assert total.item() == pytest.approx(sum(t.item() for t in terms))
    total.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients(model), expected)
    output = loss.output
    assert output.loss_total == pytest.approx(total.item())
    assert output.factors == {"base": 1.0, "activity": 0.5, "confidence": 0.5}
    if not tracked:
        assert (output.total_grad_norm, output.cosines) == (None, {})
        return
    plain, _ = composed(model, **settings)
    assert output.cosines == pytest.approx(plain.output.cosines, abs=1e-6)
    if wrt:
        norm = torch.cat([g.flatten() for g in expected]).norm().item()
        assert output.total_grad_norm == pytest.approx(norm, rel=1e-5)


def test_a_composite_tells_its_aggregator_of_the_weighted_gradients() -> None:
    model, noted = Net(), Noted()
    loss, _ = composed(model, aggregate=noted, wrt=model)
    x, labels = batch()
    out = model(x)
    values = [
        cross_entropy(out["logits"], labels),
        activity(out["hidden"])[0],
        confidence(out["logits"]),
    ]
    rows = [
        torch.cat([(g if g is not None else torch.zeros_like(p)).flatten() for p, g in zip(
            model.parameters(),
            torch.autograd.grad(v, list(model.parameters()), retain_graph=True, allow_unused=True),
            strict=True,
        )])
        for v in values
    ]  # fmt: skip
    rows = [w * row for w, row in zip((1.0, 0.5, 0.25), rows, strict=True)]
    ((told, weights, products),) = noted.given
    assert told == pytest.approx([v.item() for v in values])
    assert weights == [1.0, 0.5, 0.25]
    stacked = torch.stack(rows)
    torch.testing.assert_close(torch.tensor(products), stacked @ stacked.T, rtol=1e-4, atol=1e-7)
    assert loss.output.skipped == {}


def test_a_share_is_of_the_terms_with_their_factors() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    loss = CompositeLoss(
        lambda x: 3 * x, [term(lambda x: x.square(), 4.0, "square")], aggregate=Halved()
    )
    loss.share = 0.25
    total = loss(x=x)
    assert total.item() == 6.0 + 0.25 * 4.0 * 4.0
    total.backward()
    assert x.grad is not None
    assert x.grad.item() == 3.0 + 0.25 * 0.5 * 4.0 * 4.0


def test_a_share_counts_in_what_the_aggregator_sees() -> None:
    noted, x = Noted(), torch.tensor([1.0, -1.0], requires_grad=True)
    loss = CompositeLoss(lambda x: x.sum(), [term(lambda x: x[0], 4.0, "first")], aggregate=noted)
    loss.share = 0.25
    loss(x=x)
    ((_, weights, products),) = noted.given
    assert (weights, products) == ([1.0, 1.0], [[2.0, 1.0], [1.0, 1.0]])


@pytest.mark.parametrize(("bound", "sign"), [({"at_most": 1.0}, 1), ({"at_least": 100.0}, -1)])
def test_a_bounded_term_is_a_row_with_its_multiplier(bound: dict[str, Any], sign: int) -> None:
    noted = Noted()
    spec = RegularizerSpec(l2, name="l2", run_in="inline", **bound)
    output = Pipeline(nll, [spec], aggregate=noted).compute([], LOGPROBS)
    multiplier = output.regularizers["l2"].weight
    assert multiplier > 0
    ((_, weights, products),) = noted.given
    assert weights == [1.0, sign * multiplier]
    assert products[0][1] == pytest.approx(sign * multiplier * (BASE @ (2 * FLAT)).item())
    expected = BASE + 0.5 * sign * multiplier * 2 * FLAT
    torch.testing.assert_close(torch.cat(list(output.gradients)), expected)


def test_without_gradients_there_is_nothing_to_aggregate() -> None:
    noted = Noted()
    loss = CompositeLoss(
        lambda x: x.sum(), [term(lambda x: x.prod(), 2.0, "prod")], aggregate=noted
    )
    assert loss(x=torch.tensor([2.0, 3.0])).item() == 5.0 + 12.0
    assert noted.given == []


def test_the_base_loss_may_have_a_factor_too() -> None:
    class Turned(Aggregator):
        def factors(self, values: Any, weights: Any, products: Any) -> Sequence[float]:
            return [-2.0, 0.0]

    output = Pipeline(nll, SPECS[:1], aggregate=Turned()).compute([], LOGPROBS)
    torch.testing.assert_close(torch.cat(list(output.gradients)), -2.0 * BASE)


def test_terms_that_fuse_are_computed_one_by_one_for_an_aggregator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = count_together(monkeypatch)
    specs = [
        RegularizerSpec(WholeVocabulary(kind="entropy"), 0.5, anchor=True),
        RegularizerSpec(WholeVocabulary(kind="z_loss"), 0.1, anchor=True),
    ]
    given = {"logits": [torch.randn(3, 5), torch.randn(1, 5), torch.randn(2, 5)]}
    for aggregate, wanted in (("sum", [2]), (Halved(), [2])):
        pipeline = Pipeline(nll, specs, aggregate=aggregate, gives=("logits",))
        output = pipeline.compute([{}] * 3, LOGPROBS, given=given)
        assert together == wanted
        assert list(output.regularizers) == ["whole_entropy", "whole_z_loss"]


def test_fused_terms_of_a_composite_have_their_own_factors() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7, requires_grad=True)
    targets = torch.arange(4)
    terms = [term(entropy, 0.3), term(z_loss, 0.1)]

    def base(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, targets)

    loss = CompositeLoss(base, terms, aggregate=Halved())
    total = loss(logits=logits, targets=targets)
    (found,) = torch.autograd.grad(total, logits)
    parts = [base(logits, targets), 0.3 * entropy(logits), 0.1 * z_loss(logits)]
    assert total.item() == pytest.approx(sum(p.item() for p in parts))
    (wanted,) = torch.autograd.grad(parts[0] + 0.5 * (parts[1] + parts[2]), logits)
    torch.testing.assert_close(found, wanted)


def test_the_sum_needs_no_gram_matrix() -> None:
    assert SUM.factors([1.0, 2.0], [1.0, 0.5], []) == [1.0, 1.0]
    assert not SUM.reads_gram


def test_an_aggregator_is_not_given_a_gradient_that_is_not_finite() -> None:
    def steep(_: Any, logprobs: list[Tensor]) -> Tensor:
        return (logprobs[1] * 0).abs().sqrt().sum()

    skipped = RegularizerSpec(steep, 1.0, "steep", on_error="skip", run_in="inline")
    noted = Noted()
    output = Pipeline(nll, [skipped, *SPECS], aggregate=noted).compute([], LOGPROBS)
    assert list(output.skipped) == ["steep"]
    expected = WEIGHTED[0] + 0.5 * (WEIGHTED[1] + WEIGHTED[2])
    torch.testing.assert_close(torch.cat(list(output.gradients)), expected)
    ((values, _, products),) = noted.given
    assert len(values) == 3
    assert all(math.isfinite(product) for row in products for product in row)


# Reading numbers.


class Far(Tensor):
    """A tensor that says it is on an accelerator, where one number at a time is not read."""

    is_cpu = False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def to(self, *_: object) -> Tensor:  # type: ignore[override]
        return self

    def item(self) -> float:
        raise AssertionError("each of these would wait for the device")


def test_values_on_an_accelerator_are_read_at_once_and_kept() -> None:
    values = [torch.tensor(float(i), requires_grad=True) for i in range(3)]
    results = [flat(str(i), 1.0, FLAT, value=Far(v)) for i, v in enumerate(values)]
    results.append(flat("read", 1.0, FLAT, number=7.0))
    results.append(flat("dropped", 1.0, FLAT))
    assert read_numbers(results) == [0.0, 1.0, 2.0, 7.0, 0.0]
    assert [each.number for each in results] == [0.0, 1.0, 2.0, 7.0, None]
