from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

from steelyard import Pipeline, RegularizerSpec
from steelyard.errors import InputError, SpecError, StateError
from steelyard.regularizers import L1, L2, Adaptive, EMADrift
from steelyard.spec.protocol import is_async

from .checks import assert_gradients, doubles, plain, value_and_gradients


def nll(_: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
    return -torch.cat(logprobs).mean()


class Judge:
    name = "judge"
    gradient = "score"

    async def compute(self, data: Any, logprobs: Any) -> tuple[list[float], dict[str, float]]:
        await asyncio.sleep(0)
        return [1.0, 3.0], {"asked": 2.0}


def penalties_of(term: Any, *values: float) -> list[float]:
    """Penalties of successive batches of one token each."""
    return [term.compute([], [torch.tensor([value])])[0].item() for value in values]


# EMADrift.


def test_the_moving_average_by_hand() -> None:
    drift = EMADrift(decay=0.75)
    assert penalties_of(drift, -1.0, -3.0, -1.5, -1.5) == [0.0, 4.0, 0.0, 0.0]
    assert drift.state_dict() == {"average": -1.5}


def test_the_gradient_treats_the_average_as_a_constant() -> None:
    rows = doubles([-0.5, -1.5], [-3.0])
    drift = EMADrift(decay=1.0)
    drift.load_state_dict({"average": -1.0})
    assert value_and_gradients(drift, [], rows)[0] == pytest.approx((2 / 3) ** 2)
    assert_gradients(drift, [], rows, lambda lps: (torch.cat(lps).mean().item() + 1.0) ** 2)


def test_the_first_batch_has_no_penalty_and_no_gradient() -> None:
    value, (gradient,) = value_and_gradients(EMADrift(), [], doubles([-0.5, -1.5]))
    assert value == 0
    assert gradient.tolist() == [0.0, 0.0]


def test_ema_drift_resumes_from_a_saved_state() -> None:
    whole, first, second = EMADrift(decay=0.9), EMADrift(decay=0.9), EMADrift(decay=0.9)
    values = [-1.0, -2.0, -4.0, -3.0]
    expected = penalties_of(whole, *values)
    early = penalties_of(first, *values[:2])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert early + penalties_of(second, *values[2:]) == expected


def test_non_finite_batches_do_not_change_the_average() -> None:
    drift = EMADrift(decay=0.5)
    penalties_of(drift, -1.0, float("-inf"), float("nan"))
    assert drift.state_dict() == {"average": -1.0}


def test_a_batch_without_counted_tokens_does_not_change_the_average() -> None:
    drift = EMADrift(decay=0.5)
    empty = [plain(weights=[0.0, 0.0])]
    assert drift.compute(empty, [torch.tensor([-1.0, -2.0])]) is None
    assert drift.state_dict() == {"average": None}
    penalties_of(drift, -1.0)
    drift.compute(empty, [torch.tensor([-8.0, -9.0])])
    assert drift.state_dict() == {"average": -1.0}


def test_the_measured_drift_is_that_from_the_reference_by_hand() -> None:
    drift = EMADrift(decay=0.5)
    penalties_of(drift, -5.0)
    data = [
        plain(weights=[1.0, 0.0], reference_logprobs=[-1.0, -99.0]),
        plain(reference_logprobs=[-4.0, -4.0]),
    ]
    for _ in range(2):
        value, metrics = drift.measure(data, doubles([-2.0, -9.0], [-2.0, -2.0]))
        assert value.item() == pytest.approx((-2.0 + 3.0) ** 2)
        assert metrics == {"mean": -2.0, "reference": -3.0}
    assert drift.state_dict() == {"average": -5.0}
    with pytest.raises(InputError, match="datum 0 must have the field 'reference_logprobs'"):
        drift.measure([plain()], doubles([-2.0]))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "state must hold exactly ['average'], got [] (regularizer 'ema_drift')."),
        (3, "state must hold exactly ['average'], got 3 (regularizer 'ema_drift')."),
        (
            {"average": "-1"},
            "average must be a finite number or None, got '-1' (regularizer 'ema_drift').",
        ),
    ],
)
def test_invalid_states_of_ema_drift(state: Any, message: str) -> None:
    with pytest.raises(StateError) as caught:
        EMADrift().load_state_dict(state)
    assert str(caught.value) == message


def test_a_pipeline_saves_and_restores_both() -> None:
    def pipeline() -> Pipeline:
        adaptive = Adaptive(regularizer=EMADrift(decay=0.5), target=1.0)
        return Pipeline(nll, [RegularizerSpec(EMADrift(), 1.0), RegularizerSpec(adaptive, 1.0)])

    first, second = pipeline(), pipeline()
    for value in (-1.0, -4.0):
        first.compute([], doubles([value]))
    state = json.loads(json.dumps(first.state_dict()))
    assert state["adaptive_ema_drift"]["regularizer"] == {"average": -2.5}
    second.load_state_dict(state)
    third = doubles([-2.0])
    assert first.compute([], third).loss_total == second.compute([], third).loss_total


def test_a_stateful_regularizer_refuses_a_process() -> None:
    for term in (EMADrift(), Adaptive(regularizer=L1(), target=1.0)):
        with pytest.raises(SpecError, match="run_in='process' cannot run a stateful term"):
            RegularizerSpec(term, 1.0, run_in="process")


# Adaptive.


def test_the_multiplier_by_hand() -> None:
    """The proportional controller of Ziegler et al.: error clipped at 0.2."""
    term = Adaptive(regularizer=L1(), target=2.0, rate=0.5)
    multipliers = []
    for value in (-2.2, -9.0, -0.1, -2.0):
        _, metrics = term.compute([], [torch.tensor([value])])
        multipliers.append(metrics["multiplier"])
    # Relative errors 0.1, 3.5 (0.2), -0.95 (-0.2), 0.
    expected = [1.0, 1.05, 1.05 * 1.1, 1.05 * 1.1 * 0.9]
    assert multipliers == pytest.approx(expected, rel=1e-6)
    assert term.multiplier == pytest.approx(expected[-1], rel=1e-6)


def test_a_value_above_a_negative_target_raises_the_multiplier() -> None:
    # The value of an entropy bonus is -H: -1 is above its target -2, so the bonus must grow.
    term = Adaptive(regularizer={"fn": "entropy", "options": {"mode": "bonus"}}, target=-2.0)
    penalties_of(term, -1.0)
    assert term.multiplier > 1
    penalties_of(term, -9.0, -9.0)
    assert term.multiplier < 1


def test_value_and_gradient_are_scaled() -> None:
    rows = doubles([-0.5, -1.5])
    term = Adaptive(regularizer=L2(), target=1.0, initial=3.0)
    value, (gradient,) = value_and_gradients(term, [], rows)
    own, (own_gradient,) = value_and_gradients(L2(), [], rows)
    assert value == pytest.approx(3 * own)
    torch.testing.assert_close(gradient, 3 * own_gradient)


def test_the_wrapped_regularizer_is_measured_without_the_multiplier() -> None:
    term = Adaptive(regularizer=L1(), target=1.0, initial=3.0)
    for _ in range(2):
        assert term.measure([], [torch.tensor([-2.0])])[0] == 2.0
    assert term.multiplier == 3.0
    judge = Adaptive(regularizer=Judge(), target=1.0, initial=3.0)
    assert is_async(judge.measure)
    assert asyncio.run(judge.measure([], [])) == ([1.0, 3.0], {"asked": 2.0})


class Scaled(EMADrift):
    gradient = "score"

    def compute(self, data: Any, logprobs: Any, scale: float = 1.0) -> Any:
        return [scale * super().compute(data, logprobs)[0].item()]


def test_options_leave_the_wrapped_regularizer_its_state_and_its_gradient() -> None:
    term = Adaptive(regularizer={"fn": Scaled(), "options": {"scale": 2.0}}, target=1.0)
    assert (term.gradient, term.name) == ("score", "adaptive_ema_drift")
    term.compute([], [torch.tensor([-2.0])])
    assert term.state_dict()["regularizer"] == {"average": -2.0}
    assert term.compute([], [torch.tensor([-3.0])])[1]["observed"] == 2.0


def test_the_multiplier_stays_within_its_bounds() -> None:
    term = Adaptive(regularizer=L1(), target=1.0, rate=1.0, minimum=0.7, maximum=1.3)
    penalties_of(term, *[-9.0] * 9)
    assert term.multiplier == 1.3
    penalties_of(term, *[-0.01] * 9)
    assert term.multiplier == 0.7


def test_non_finite_values_do_not_change_the_multiplier() -> None:
    term = Adaptive(regularizer=L1(), target=1.0)
    penalties_of(term, float("nan"), float("-inf"))
    assert term.multiplier == 1.0


def test_it_wraps_a_coroutine_with_penalties_per_datum() -> None:
    term = Adaptive(regularizer=Judge(), target=1.0, initial=2.0)
    assert is_async(term)
    assert term.name == "adaptive_judge"
    spec = RegularizerSpec(term, 1.0)
    output = Pipeline(nll, [spec]).compute([{}, {}], doubles([-1.0], [-1.0]))
    found = output.regularizers["adaptive_judge"]
    assert found.value == 4.0
    assert found.custom == {"asked": 2.0, "observed": 2.0, "multiplier": 2.0}
    base = Pipeline(nll).compute([{}, {}], doubles([-1.0], [-1.0]))
    added = [(a - b).item() for a, b in zip(output.gradients, base.gradients, strict=True)]
    assert added == pytest.approx([-2.0, 2.0])


def test_it_wraps_a_plain_function_that_returns_an_awaitable() -> None:
    def asked(data: Any, logprobs: Any) -> Any:
        return Judge().compute(data, logprobs)

    term = Adaptive(regularizer=asked, target=1.0, initial=2.0)
    assert not is_async(term)
    spec = RegularizerSpec(term, 1.0, gradient="score")
    output = Pipeline(nll, [spec]).compute([{}, {}], doubles([-1.0], [-1.0]))
    assert output.regularizers["adaptive_term"].value == 4.0
    assert term.multiplier == pytest.approx(2.0 * 1.02)


@pytest.mark.parametrize(
    "described",
    [
        "l1",
        L1(),
        {"fn": "l1"},
        {"fn": L1()},
        {"fn": "l1", "options": {"of": "logprobs"}},
        lambda data, logprobs: torch.cat(logprobs).abs().mean(),
        {
            "fn": lambda data, logprobs, scale: scale * torch.cat(logprobs).abs().mean(),
            "options": {"scale": 1.0},
        },
    ],
)
def test_forms_of_the_wrapped_regularizer(described: Any) -> None:
    term = Adaptive(regularizer=described, target=1.0)
    assert penalties_of(term, -3.0) == [3.0]


def test_the_wrapped_regularizer_may_return_a_number() -> None:
    term = Adaptive(regularizer=lambda data, logprobs: 3, target=1.0, initial=2.0)
    assert penalties_of(term, -3.0) == [6.0]


def test_the_state_of_adaptive() -> None:
    term = Adaptive(regularizer=L1(), target=1.0)
    penalties_of(term, -9.0)
    state = json.loads(json.dumps(term.state_dict()))
    assert state == {"multiplier": pytest.approx(1.02), "regularizer": None}
    other = Adaptive(regularizer=L1(), target=1.0)
    other.load_state_dict(state)
    assert other.multiplier == term.multiplier


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"multiplier": 1.0},
            "state must hold exactly ['multiplier', 'regularizer'], got ['multiplier']",
        ),
        (
            {"multiplier": 0.0, "regularizer": None},
            "multiplier must be a number between 0.0001 and 10000, got 0.0",
        ),
    ],
)
def test_invalid_states_of_adaptive(state: Any, message: str) -> None:
    with pytest.raises(StateError) as caught:
        Adaptive(regularizer=L1(), target=1.0).load_state_dict(state)
    assert str(caught.value) == f"{message} (regularizer 'adaptive_l1')."


def test_reprs() -> None:
    assert repr(EMADrift(decay=0.5)) == "EMADrift(decay=0.5)"
    assert repr(Adaptive(regularizer=EMADrift(decay=0.5), target=2.0)) == (
        "Adaptive(regularizer=EMADrift(decay=0.5), target=2.0)"
    )
