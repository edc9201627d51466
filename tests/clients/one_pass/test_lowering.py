from __future__ import annotations

from typing import Any

import pytest
import torch
from tinker import types

from steelyard import Pipeline, RegularizerSpec
from steelyard.clients.one_pass.lowering import LoweredBatch, Lowering, NotLoweredError
from steelyard.composition.named_losses import NamedBaseLoss
from steelyard.composition.per_datum import PerDatum
from steelyard.regularizers import L1, L2, ChosenNLL, DemographicParity, KLToReference

from .batches import LENGTHS, batch

KL = RegularizerSpec(KLToReference(), weight=0.2, name="kl")


def lower(
    specs: Any, lowering: Lowering | None = None, *, data: Any = None, tracked: bool = True
) -> LoweredBatch:
    data = batch() if data is None else data
    pipeline = Pipeline(NamedBaseLoss.of("cross_entropy"), specs)
    terms = pipeline.due()
    weights = [term.weight_at(0) for term in terms]
    return (lowering or Lowering()).lower(terms, weights, data, tracked=tracked)


def served(lowered: LoweredBatch, logprobs: list[torch.Tensor]) -> dict[str, float]:
    """Metrics as a server sums them over the data."""
    function, sums = lowered.graph.function(), dict[str, float]()
    for datum, row in zip(lowered.data, logprobs, strict=True):
        names = list(lowered.graph.ranks)[1:]
        fields = [datum.loss_fn_inputs[name].to_torch() for name in names]
        for key, value in function(row, *fields)[1].items():
            sums[key] = sums.get(key, 0.0) + value.item()
    return sums


@pytest.mark.parametrize("tracked", [False, True])
def test_results_are_those_of_a_pipeline(tracked: bool) -> None:
    specs = [KL, RegularizerSpec(L1(reduction="sum"), weight=0.5)]
    logprobs = [torch.linspace(-7, -3, length) for length in LENGTHS]
    lowered = lower(specs, tracked=tracked)
    results = lowered.results(served(lowered, logprobs))
    pipeline = Pipeline(NamedBaseLoss.of("cross_entropy"), specs, tracked)
    output = pipeline.compute(batch(), logprobs)
    terms = output.regularizers.values()
    expected = [output.base_loss.value, *(term.value for term in terms)]
    assert list(results.values) == pytest.approx(expected, rel=1e-6)
    for found, term in zip(results.metrics[1:], terms, strict=True):
        assert found == pytest.approx(term.custom, rel=1e-6)
    if not tracked:
        assert results.products is None
        return
    norms = [output.base_loss.grad_norm, *(term.grad_norm for term in terms)]
    assert results.products is not None
    sizes = [results.products[i][i] ** 0.5 for i in range(3)]
    assert sizes == pytest.approx(norms, rel=1e-6)
    assert results.squared_norm == pytest.approx((output.total_grad_norm or 0) ** 2, rel=1e-6)


def test_a_graph_is_built_once_for_equal_terms() -> None:
    lowering = Lowering()
    first = lower([KL], lowering)
    # Another weight, another object of the same value, another batch.
    spec = RegularizerSpec(KLToReference(), weight=0.9, name="kl")
    second = lower([spec], lowering, data=batch(3, lengths=[2, 8]))
    assert first.graph is second.graph
    assert lower([KL], lowering, tracked=False).graph is not first.graph
    assert lower([KL], lowering, data=batch(width=3)).graph is not first.graph


def test_a_factor_is_the_weight_over_the_denominator() -> None:
    data = batch(weights=False, logprobs=False)
    lowered = lower([RegularizerSpec(L2(), weight=0.7)], data=data)
    factors = [
        lowered.data[0].loss_fn_inputs[name].to_torch().item() for name in ("factor_0", "factor_1")
    ]
    assert factors == pytest.approx([1.0, 0.7 / sum(LENGTHS)])


def test_all_reasons_are_listed() -> None:
    specs = [
        KL,
        RegularizerSpec(DemographicParity(test="none"), weight=1.0),
        RegularizerSpec(L2(center="mean"), weight=1.0),
    ]
    with pytest.raises(NotLoweredError) as caught:
        lower(specs)
    assert list(caught.value.reasons) == ["demographic_parity", "l2"]


def test_a_term_without_a_form_is_left_out_and_a_base_loss_is_not() -> None:
    data = batch(weights=False)
    chosen = data[0].loss_fn_inputs["target_tokens"].to_torch()
    data[0].loss_fn_inputs["weights"] = types.TensorData.from_torch(torch.zeros(len(chosen)))
    anchor = RegularizerSpec(ChosenNLL(pair=lambda datum, index: index // 2), 0.3, "anchor")
    lowered = lower([anchor, KL], data=data[:2])
    assert lowered.unmeasured == ["anchor"]
    assert [term.name for term in lowered.terms] == ["base", "kl"]
    pipeline = Pipeline(ChosenNLL(), [KL])
    with pytest.raises(NotLoweredError, match="base: it has nothing to measure in this batch"):
        Lowering().lower(pipeline.due(), [1.0, 0.2], data[:2], tracked=False)


def test_missing_fields_and_empty_batches_are_reasons() -> None:
    with pytest.raises(NotLoweredError, match="kl: datum 0 must have 'reference_logprobs'"):
        lower([KL], data=batch(reference_logprobs=False))
    with pytest.raises(NotLoweredError, match="the batch is empty"):
        lower([KL], data=[])
    with pytest.raises(NotLoweredError, match="targets of one rank"):
        lower([KL], data=[*batch(), *batch(width=3)])


def test_functions_with_the_same_operations_have_results_of_their_own() -> None:
    """Both divide by 2 when they are traced, one of them because there are two data."""
    logprobs = [torch.linspace(-7, -3, length) for length in LENGTHS]
    lowering, total = Lowering(), torch.cat(logprobs).sum().item()

    def by_count(data: Any, rows: Any) -> Any:
        return sum(row.sum() for row in rows) / len(data), {"mean": torch.cat(rows).mean()}

    def by_two(_: Any, rows: Any) -> Any:
        return sum(row.sum() for row in rows) / 2, {"average": torch.cat(rows).mean()}

    for fn, by in ((by_count, len(LENGTHS)), (by_two, 2)):
        lowered = lower([RegularizerSpec(fn, weight=1.0, name="mine")], lowering)
        results = lowered.results(served(lowered, logprobs))
        assert results.values[1] == pytest.approx(total / by, rel=1e-6)
        (metric,) = results.metrics[1].values()
        assert metric == pytest.approx(total / sum(LENGTHS), rel=1e-6)


def test_too_many_inputs_are_a_reason() -> None:
    specs = [RegularizerSpec(L2(), weight=1.0, name=f"l2 {index}") for index in range(13)]
    with pytest.raises(NotLoweredError, match="at most 16 inputs, and this one has 17"):
        lower(specs)
    assert lower(specs[:12]).graph.ranks["factor_12"] == 0


class Odd:
    name = "odd"

    def compute(self, data: Any, logprobs: Any) -> Any:
        return torch.cat(logprobs).sort().values.sum()

    def per_datum(self, data: Any, shapes: Any) -> PerDatum:
        return PerDatum(lambda logprobs: logprobs.sort().values)


def test_a_form_that_cannot_be_differentiated_is_a_reason() -> None:
    with pytest.raises(NotLoweredError, match="odd: sort is not an operation of uploaded losses"):
        lower([RegularizerSpec(Odd(), weight=1.0)])
