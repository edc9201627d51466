"""Aggregators at steps where some terms have no row: what they have by row is cut by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torchjd import aggregation

from steelyard import Pipeline, RegularizerSpec
from steelyard.clients.term_states import decode_state, encode_state
from steelyard.composition.aggregate import AggregationWarning, Aggregator
from steelyard.composition.composite import CompositeLoss
from steelyard.composition.input_names import term
from steelyard.composition.weightings import GramWeighting, aggregator_of
from steelyard.errors import StateError

# Gradients of the base loss and of three terms, with conflicts between them.
ROWS = torch.tensor(
    [[4.0, 1.0, 0.0], [-2.0, 1.0, 0.5], [0.5, -1.0, 2.0], [-1.0, -1.0, 1.0]], dtype=torch.float64
)
NAMES = ("base", "a", "b", "c")
VECTOR = [2.0, 0.5, 3.0, 0.25]


def gradient(index: int) -> Callable[..., Tensor]:
    return lambda _, logprobs: (torch.cat(logprobs) * ROWS[index]).sum()


def fails(_: Any, logprobs: list[Tensor]) -> Tensor:
    raise OSError("away")


def measures_nothing(_: Any, logprobs: list[Tensor]) -> None:
    return None


def pipeline(aggregate: Any, b: Mapping[str, Any] | None = None) -> Pipeline:
    """Three terms of weight 1; `b` has other fields."""
    fields: dict[str, dict[str, Any]] = {
        name: {"weight": 1.0, "run_in": "inline"} for name in NAMES[1:]
    }
    fields["b"] |= b or {}
    specs = [
        RegularizerSpec(**{"fn": gradient(i), "name": name, **fields[name]})
        for i, name in enumerate(NAMES)
        if name != "base"
    ]
    return Pipeline(gradient(0), specs, aggregate=aggregate)


# The log-probs are 0, and with them the values: a bound of 1 is not violated.
ABSENT: dict[str, dict[str, Any]] = {
    "of weight 0": {"weight": 0.0},
    "of a schedule that is 0": {"weight": lambda step: 0.0},
    "within its bound": {"weight": None, "at_most": 1.0},
    "not due": {"every": 2},
    "disabled": {"enabled": False},
    "skipped": {"fn": fails, "on_error": "skip"},
    "not measured": {"fn": measures_nothing},
}
LEFT = [0, 1, 3]
by_row = pytest.mark.parametrize(
    "aggregate",
    [
        {"use": "constant", "weights": VECTOR},
        {"use": "upgrad", "pref_vector": VECTOR},
        {"use": "dualproj", "pref_vector": VECTOR},
        {"use": "aligned_mtl", "pref_vector": VECTOR},
        {"use": "pcd", "tau": [0.3, 0.1, 0.6]},
        {"use": "cr_mogm", "weighting": "upgrad", "initial_weights": VECTOR},
    ],
    ids=lambda aggregate: aggregate["use"],
)


def by_torchjd(aggregate: Mapping[str, Any], places: Sequence[int]) -> list[float]:
    """Factors of some rows by TorchJD, with the vector cut by hand."""

    def cut(numbers: Sequence[float], of: Sequence[int]) -> Tensor:
        return torch.tensor([numbers[place] for place in of], dtype=torch.float64)

    rows = ROWS[list(places)]
    gramian = rows @ rows.T
    name = aggregate["use"]
    if name == "constant":
        return cut(VECTOR, places).tolist()
    weighting: Any
    if name == "pcd":
        weighting = aggregation.PCDWeighting(cut(aggregate["tau"], [i - 1 for i in places[1:]]))
    elif name == "cr_mogm":
        ones = torch.ones(len(places), dtype=torch.float64)
        inner = aggregation.UPGradWeighting(ones)
        weighting = aggregation.CRMOGMWeighting(inner, initial_weights=cut(VECTOR, places))
    else:
        kinds = {
            "upgrad": aggregation.UPGradWeighting,
            "dualproj": aggregation.DualProjWeighting,
            "aligned_mtl": aggregation.AlignedMTLWeighting,
        }
        weighting = kinds[name](pref_vector=cut(VECTOR, places))
    if name != "pcd":
        gramian = gramian / gramian.trace()
    return weighting(gramian).tolist()  # type: ignore[no-any-return]  # untyped in torch


@by_row
@pytest.mark.parametrize("absent", ABSENT.values(), ids=ABSENT)
def test_the_numbers_of_the_rows_that_are_left(
    aggregate: dict[str, Any], absent: dict[str, Any]
) -> None:
    output = pipeline(aggregate, absent).compute([], [torch.zeros(3).double()], step=1)
    factors = [output.factors[NAMES[i]] for i in LEFT]
    assert factors == pytest.approx(by_torchjd(aggregate, LEFT), rel=1e-4)
    expected = torch.tensor(factors, dtype=torch.float64) @ ROWS[LEFT]
    torch.testing.assert_close(output.gradients, [expected])


@by_row
def test_with_all_rows_it_is_torchjd_again(aggregate: dict[str, Any]) -> None:
    """Cutting changes nothing for the steps after."""
    of_steps = pipeline(aggregate, {"every": 2})
    of_steps.compute([], [torch.zeros(3).double()], step=1)
    output = of_steps.compute([], [torch.zeros(3).double()], step=2)
    expected = by_torchjd(aggregate, range(4))
    assert list(output.factors.values()) == pytest.approx(expected, rel=1e-4)


def test_an_anchor_has_no_number() -> None:
    aggregate = {"use": "constant", "weights": [2.0, 0.5, 0.25]}
    output = pipeline(aggregate, {"anchor": True}).compute([], [torch.zeros(3)])
    assert output.factors == {"base": 2.0, "a": 0.5, "b": 1.0, "c": 0.25}


def test_mgda_does_not_stop_at_a_term_that_is_switched_off() -> None:
    output = pipeline("mgda", {"weight": 0.0}).compute([], [torch.zeros(3).double()])
    rows = ROWS[LEFT]
    expected = aggregation.MGDAWeighting()(rows @ rows.T / (rows @ rows.T).trace()).tolist()
    assert [output.factors[NAMES[i]] for i in LEFT] == pytest.approx(expected, rel=1e-6)
    assert torch.cat(output.gradients).norm() > 0.1


def test_a_row_that_is_alone_has_its_number() -> None:
    for aggregate in (
        {"use": "constant", "weights": [2.0, 0.5]},
        {"use": "upgrad", "pref_vector": [2.0, 0.5]},
    ):
        spec = RegularizerSpec(gradient(1), 0.0, "a", run_in="inline")
        alone = Pipeline(gradient(0), [spec], aggregate=aggregate)
        output = alone.compute([], [torch.zeros(3).double()])
        assert output.factors["base"] == pytest.approx(2.0)
        torch.testing.assert_close(output.gradients, [2 * ROWS[0]])


def test_a_composite_cuts_by_name_too() -> None:
    def fn(index: int) -> Callable[..., Tensor]:
        return lambda x: (x * ROWS[index]).sum()

    terms = [term(fn(i), 0.0 if i == 2 else 1.0, NAMES[i]) for i in (1, 2, 3)]
    loss = CompositeLoss(fn(0), terms, aggregate={"use": "constant", "weights": VECTOR})
    x = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    loss(x=x).backward()
    expected = sum(VECTOR[i] * ROWS[i] for i in LEFT)
    torch.testing.assert_close(x.grad, expected)
    loss.share = 0.0  # of a micro-batch without a token that counts
    x.grad = None
    loss(x=x).backward()
    torch.testing.assert_close(x.grad, 2 * ROWS[0])


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        ({"use": "constant", "weights": [1.0, 2.0]}, "weights of constant.*'base', 'a', 'b', 'c'"),
        ({"use": "upgrad", "pref_vector": [1.0] * 5}, "pref_vector of upgrad.*'c', got 5"),
        ({"use": "pcd", "tau": [0.5]}, "tau of pcd must have one number for each of 'a', 'b'"),
    ],
)
@pytest.mark.parametrize("step", [0, 1])
def test_a_vector_of_another_length_is_named(
    aggregate: dict[str, Any], message: str, step: int
) -> None:
    with pytest.warns(AggregationWarning, match=message):
        output = pipeline(aggregate, {"every": 2}).compute([], [torch.zeros(3)], step=step)
    assert output.factors == {}


def test_an_object_that_is_changed_between_steps_is_followed() -> None:
    weighting = aggregation.UPGradWeighting(torch.tensor(VECTOR).double())
    built = pipeline(weighting, {"every": 2})
    built.compute([], [torch.zeros(3).double()], step=1)
    assert weighting.pref_vector is not None
    assert weighting.pref_vector.tolist() == VECTOR
    other = [1.0, 1.5, 2.0, 2.5]
    weighting.pref_vector = torch.tensor(other).double()
    output = built.compute([], [torch.zeros(3).double()], step=1)
    rows = ROWS[LEFT]
    cut = torch.tensor([other[i] for i in LEFT]).double()
    theirs = aggregation.UPGradWeighting(cut)(rows @ rows.T / (rows @ rows.T).trace())
    assert [output.factors[NAMES[i]] for i in LEFT] == pytest.approx(theirs.tolist(), rel=1e-4)


def test_an_aggregator_of_ones_own_gets_the_names() -> None:
    seen = []

    class Named(Aggregator):
        def factors(self, values: Any, weights: Any, products: Any) -> Sequence[float]:
            return [1.0] * len(values)

        def factors_of(
            self, rows: Any, declared: Any, values: Any, weights: Any, products: Any
        ) -> Sequence[float]:
            seen.append((list(rows), list(declared)))
            return super().factors_of(rows, declared, values, weights, products)

    pipeline(Named(), {"every": 2}).compute([], [torch.zeros(3)], step=1)
    assert seen == [(["base", "a", "c"], ["base", "a", "b", "c"])]


# Statistics.


def smoothed() -> GramWeighting:
    """A moving average of MGDA's factors: no random numbers, and a memory."""
    aggregator = aggregator_of({"use": "cr_mogm", "weighting": "mgda", "alpha": 0.5})
    assert isinstance(aggregator, GramWeighting)
    return aggregator


def batch(step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).double()


def factors(aggregator: GramWeighting, names: Sequence[str], step: int) -> list[float]:
    rows = batch(step)[[NAMES.index(name) for name in names]]
    ones = [1.0] * len(names)
    return list(aggregator.factors_of(names, NAMES, ones, ones, (rows @ rows.T).tolist()))


SETS = [NAMES, ("base", "a", "c"), NAMES, ("base", "b", "c"), ("base", "a", "c"), NAMES]


def test_each_set_of_rows_has_statistics_of_its_own() -> None:
    aggregator = smoothed()
    found = [factors(aggregator, names, step) for step, names in enumerate(SETS)]
    theirs = {
        names: aggregation.CRMOGMWeighting(aggregation.MGDAWeighting(), alpha=0.5) for names in SETS
    }
    for step, names in enumerate(SETS):
        rows = batch(step)[[NAMES.index(name) for name in names]]
        gramian: Any = rows @ rows.T
        expected = theirs[names](gramian / gramian.trace()).tolist()
        assert found[step] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("use", ["cr_mogm", "gradvac", "pcd"])
@pytest.mark.parametrize("at", range(1, 6))
def test_a_saved_state_goes_on_with_the_same_bits_for_every_set(use: str, at: int) -> None:
    options = {"weighting": "mgda"} if use == "cr_mogm" else {}

    def built() -> GramWeighting:
        aggregator = aggregator_of({"use": use, **options})
        assert isinstance(aggregator, GramWeighting)
        return aggregator

    whole, first, second = built(), built(), built()
    expected = [factors(whole, names, step) for step, names in enumerate(SETS)]
    for step, names in enumerate(SETS[:at]):
        factors(first, names, step)
    state = first.state_dict()
    second.load_state_dict(decode_state("w", encode_state("w", state)))
    again = second.state_dict()  # a state that is saved before the next call is the same one
    assert encode_state("w", again) == encode_state("w", state)
    found = [factors(second, names, step) for step, names in enumerate(SETS) if step >= at]
    assert found == expected[at:]


def test_a_state_of_0_1_0_is_that_of_so_many_rows() -> None:
    saved, whole = smoothed(), smoothed()
    factors(saved, NAMES, 0)
    old = {
        "generator": saved.state_dict()["generator"],
        "rows": 4,
        "weighting": saved.weighting.state_dict(),
    }
    resumed = smoothed()
    resumed.load_state_dict(old)
    factors(whole, NAMES, 0)
    for step, names in enumerate(SETS[1:3], 1):
        assert factors(resumed, names, step) == factors(whole, names, step)


def test_statistics_that_are_not_its_own_are_an_error() -> None:
    aggregator = smoothed()
    state = {**aggregator.state_dict(), "statistics": {"4": {"other": torch.zeros(2)}}}
    aggregator.load_state_dict(state)
    with pytest.raises(StateError, match=r"statistics of cr_mogm for .* must be its own"):
        factors(aggregator, NAMES, 0)
