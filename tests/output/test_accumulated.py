"""The output of a step from those of its calls, against one call with all data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import BaseLossOutput, CustomLossOutput, Pipeline, RegularizerOutput, RegularizerSpec
from steelyard.output.accumulated import accumulated

LOGPROBS = [torch.tensor([-0.5, -1.0, -2.0]), torch.tensor([-3.0]), torch.tensor([-0.1, -4.0])]
CALLS = [[0], [1, 2]]
SHARES = [{"mean": 0.5, "base": 0.5}, {"mean": 0.5, "base": 0.5}]


def nll(data: Any, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    flat = torch.cat(list(logprobs))
    return -flat.mean(), {"nll": -flat.mean().item(), "tokens": len(flat)}


def mean(data: Any, logprobs: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
    value = torch.cat(list(logprobs)).square().mean()
    return value, {"twice": 2 * value.item(), "lines_count": len(logprobs)}


def total(data: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).exp().sum()


def outputs(**settings: Any) -> tuple[CustomLossOutput, CustomLossOutput]:
    specs = [RegularizerSpec(mean, 0.3, "mean"), RegularizerSpec(total, 0.2, "total")]
    pipeline = Pipeline(nll, specs, **settings)
    one = pipeline.compute(range(3), LOGPROBS)
    calls = [
        pipeline.compute(call, [LOGPROBS[i] for i in call], share=share)
        for call, share in zip(CALLS, SHARES, strict=True)
    ]
    return one, accumulated(calls, SHARES)


def test_values_norms_and_cosines_are_those_of_one_call() -> None:
    one, step = outputs(track_grad_norms=True)
    expected, found = one.metrics, step.metrics
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if not key.endswith("duration"):
            assert found[key] == pytest.approx(value, rel=1e-6), key
    assert step.drivers("mean")[0].datum == one.drivers("mean")[0].datum
    assert step.drivers("base")[0].share == pytest.approx(one.drivers("base")[0].share)


def test_a_term_is_not_run_if_it_ran_in_no_call() -> None:
    term = RegularizerOutput("ran", value=1.0, weight=1.0, contribution=1.0)
    base = BaseLossOutput(1.0)
    calls = [
        CustomLossOutput(1.0, base, not_run=("never", "ran")),
        CustomLossOutput(2.0, base, {"ran": term}, not_run=("never", "here")),
        CustomLossOutput(2.0, base, {"ran": term}),
    ]
    assert accumulated(calls, [{}, {}, {}]).not_run == ("never", "here")


def test_without_tracking_there_are_no_norms() -> None:
    one, step = outputs()
    assert step.metrics.keys() == one.metrics.keys()
    assert (step.total_grad_norm, step.term_gradients, step.cosines) == (None, None, {})


def test_gradients_of_the_calls_are_those_of_one_call() -> None:
    specs = [RegularizerSpec(mean, 0.3, "mean")]
    pipeline = Pipeline(nll, specs)
    one = pipeline.compute(range(3), LOGPROBS)
    rows = [
        gradient
        for call, share in zip(CALLS, SHARES, strict=True)
        for gradient in pipeline.compute(call, [LOGPROBS[i] for i in call], share=share).gradients
    ]
    torch.testing.assert_close(rows, one.gradients)


def call(value: float, **fields: Any) -> CustomLossOutput:
    term = RegularizerOutput("t", value, 0.1, 0.1 * value, **fields)
    return CustomLossOutput(1.0, BaseLossOutput(1.0), {"t": term}, 0.1 * value)


@pytest.mark.parametrize(
    ("values", "violations", "expected"),
    [((3.0, 0.0), (2.0, 0.0), 0.5), ((-1.0, 0.0), (2.0, 1.0), 1.5), ((0.5, 1.5), (0.0, 0.5), 0.0)],
)
def test_the_violation_is_that_of_the_value_of_the_step(
    values: tuple[float, float], violations: tuple[float, float], expected: float
) -> None:
    calls = [
        call(value, bound=1.0, violation=violation)
        for value, violation in zip(values, violations, strict=True)
    ]
    step = accumulated(calls, [{"t": 0.5}, {"t": 0.5}])
    assert step.regularizers["t"].violation == pytest.approx(expected)
    met = [call(0.0, bound=1.0, violation=0.0)] * 2
    assert accumulated(met, [{"t": 0.5}] * 2).regularizers["t"].violation == 0.0


def test_a_term_that_was_skipped_in_one_call_has_the_mean_of_the_others() -> None:
    skipped = CustomLossOutput(1.0, BaseLossOutput(1.0), skipped={"t": "down", "u": "gone"})
    step = accumulated([call(4.0), skipped], [{"t": 0.25}, {"t": 0.75}])
    assert step.regularizers["t"].value == 4.0
    assert step.skipped == {"u": "gone"}


def test_a_term_that_ran_without_a_token_that_counts_adds_nothing() -> None:
    empty = CustomLossOutput(
        1.0, BaseLossOutput(1.0), {"t": RegularizerOutput("t", 4.0, 0.0, 0.0, grad_norm=2.0)}
    )
    skipped = CustomLossOutput(1.0, BaseLossOutput(1.0), skipped={"t": "down"})
    step = accumulated([empty, skipped], [{"t": 0.0}, {"t": 1.0}]).regularizers["t"]
    assert (step.value, step.weight, step.contribution, step.grad_norm) == (0.0, 0.0, 0.0, 0.0)


def test_norms_of_different_spaces_are_not_combined() -> None:
    """As of an entropy that is computed from logits or from the projection, by the batch."""

    def of(*spaces: str) -> CustomLossOutput:
        terms = {
            name: RegularizerOutput(
                name, 1.0, 0.1, 0.1, grad_norm=2.0, grad_norm_weighted=0.2, grad_space=space
            )
            for name, space in zip("tu", spaces, strict=True)
        }
        return CustomLossOutput(1.0, BaseLossOutput(1.0), terms, 0.2, cosines={("t", "u"): 0.5})

    shares = [{"t": 0.5, "u": 0.5}] * 2
    step = accumulated([of("logits", "logits")] * 2, shares)
    assert step.regularizers["t"].grad_norm == pytest.approx(2**0.5)
    assert step.cosines == {("t", "u"): pytest.approx(0.5)}
    step = accumulated([of("logits", "logits"), of("hidden_states", "logits")], shares)
    assert step.regularizers["t"].grad_norm is None
    assert step.regularizers["t"].grad_norm_weighted is None
    assert step.regularizers["t"].value == pytest.approx(1.0)
    assert step.regularizers["u"].grad_norm == pytest.approx(2**0.5)
    assert step.cosines == {}


def test_metrics_of_a_server_are_combined_by_their_names() -> None:
    calls = [
        CustomLossOutput(
            1.0,
            BaseLossOutput(1.0, custom={"x": 0.0}),
            server_metrics={"loss:sum": n, "a:mean": n, "b:max": n, "c": n},
            factors={"base": n},
        )
        for n in (1.0, 3.0)
    ]
    step = accumulated(calls, [{}, {}])
    assert step.server_metrics == {"loss:sum": 4.0, "a:mean": 2.0, "b:max": 3.0, "c": 2.0}
    assert step.factors == {"base": 2.0}
    assert step.base_loss.custom == {"x": 0.0}


def test_a_cosine_with_a_gradient_of_zero_is_zero() -> None:
    none = [
        CustomLossOutput(
            0.0,
            BaseLossOutput(0.0, 0.0),
            {"t": RegularizerOutput("t", 0.0, 1.0, 0.0, 0.0, 0.0)},
            total_grad_norm=0.0,
            cosines={("base", "t"): 0.0},
        )
    ] * 2
    assert accumulated(none, [{}, {}]).cosines == {("base", "t"): 0.0}
    assert accumulated(none, [{}, {}]).base_loss.grad_norm == 0.0


def test_weights_of_zero_leave_the_last_metric() -> None:
    calls = [
        CustomLossOutput(0.0, BaseLossOutput(0.0, custom={"nll": n, "tokens": 0.0}))
        for n in (1.0, 2.0)
    ]
    assert accumulated(calls, [{}, {}]).base_loss.custom == {"nll": 2.0, "tokens": 0.0}
