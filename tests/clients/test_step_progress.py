"""Measured progress, against the values of the terms before and after a step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalTrainingClient
from steelyard.errors import SpecError
from tests.clients.sdk import Answered
from tests.engine.by_hand import datum

DATA = [
    datum([1, 2, 3], [2, 3, 4], weights=[0.0, 1.0, 0.5]),
    datum([9, 8], [8, 7], weights=[1.0, 1.0]),
]
STEP = types.AdamParams(learning_rate=0.01)


def nll(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logprobs)).sum()


def l2(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).square().mean()


class Moving:
    """A stateful term: the distance to the mean of its calls so far, which each call moves."""

    name = "moving"

    def __init__(self) -> None:
        self.mean = 0.0

    def compute(self, _: Any, logprobs: Sequence[Tensor]) -> Tensor:
        now = torch.cat(list(logprobs)).mean()
        distance = (now - self.mean).square()
        self.mean = 0.5 * self.mean + 0.5 * now.item()
        return distance

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean = state["mean"]


L2 = RegularizerSpec(l2, 0.1, "l2")


def value_of(client: Any, fn: Any, data: Any = DATA) -> float:
    """Value of a term of log-probs, with the weights as they are now."""
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    value: float = fn(None, [output["logprobs"].to_torch() for output in outputs]).item()
    return value


def test_progress_is_the_change_on_the_same_batch(either: Any) -> None:
    client = regularize(either, [L2], measure_progress=2)
    measured = []
    for _ in range(3):
        before = {name: value_of(either, fn) for name, fn in (("base", nll), ("l2", l2))}
        client.forward_backward_custom(DATA, nll).result()
        client.optim_step(STEP).result()
        after = {name: value_of(either, fn) for name, fn in (("base", nll), ("l2", l2))}
        measured.append(client.progress())
        if measured[-1]:
            expected = {name: after[name] - before[name] for name in before}
            assert measured[-1] == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert measured[-1]["base"] < 0
    assert [bool(each) for each in measured] == [True, False, True]


def test_the_pass_is_submitted_with_the_step(remote: Answered) -> None:
    client = regularize(remote, [L2], measure_progress=2)
    for _ in range(2):
        client.forward_backward_custom(DATA, nll)
        client.optim_step(STEP)
    step = ["forward", "forward_backward", "optim_step"]
    assert [name for name, _ in remote.sent] == [*step, "forward", *step]
    assert client.progress() == {}


def test_a_later_step_does_not_enter(remote: Answered) -> None:
    client = regularize(remote, measure_progress=2)
    before = value_of(remote, nll)
    client.forward_backward_custom(DATA, nll)
    client.optim_step(STEP)
    measuring = client._measuring
    assert measuring is not None
    after = value_of(remote, nll)
    client.forward_backward_custom(DATA, nll)
    client.optim_step(STEP).result()
    assert measuring.changes()["base"] == pytest.approx(after - before, rel=1e-4)


def test_named_losses_are_measured_too(either: Any) -> None:
    client = regularize(either, [L2], measure_progress=1)
    output = client.forward_backward(DATA, "cross_entropy").result()
    client.optim_step(STEP).result()
    again = client.forward_backward(DATA, "cross_entropy").result()
    change = again.base_loss.value - output.base_loss.value
    assert client.progress()["base"] == pytest.approx(change, rel=1e-4)


def test_in_an_event_loop(remote: Answered) -> None:
    client = regularize(remote, [L2], measure_progress=1)

    async def run() -> None:
        await (await client.forward_backward_custom_async(DATA, nll))
        await (await client.optim_step_async(STEP))

    before = value_of(remote, l2)
    asyncio.run(run())
    assert client.progress()["l2"] == pytest.approx(value_of(remote, l2) - before, rel=1e-3)


def test_state_of_training_stays(either: Any) -> None:
    moving = Moving()
    client = regularize(either, [RegularizerSpec(moving, 0.1)], measure_progress=1)
    client.forward_backward_custom(DATA, nll).result()
    state = moving.mean
    means = [value_of(either, lambda _, rows: torch.cat(rows).mean())]
    client.optim_step(STEP).result()
    means.append(value_of(either, lambda _, rows: torch.cat(rows).mean()))
    # Before and after with one and the same state.
    expected = (means[1] - state) ** 2 - (means[0] - state) ** 2
    assert client.progress()["moving"] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert client.progress() == client.progress()
    assert moving.mean == state


def test_a_term_that_is_measured_otherwise(either: Any) -> None:
    class Scaled:
        name = "scaled"

        def compute(self, data: Any, logprobs: Any) -> Tensor:
            return 100 * l2(data, logprobs)

        def measure(self, data: Any, logprobs: Any) -> Tensor:
            return l2(data, logprobs)

    client = regularize(either, [RegularizerSpec(Scaled(), 0.1), L2], measure_progress=1)
    client.forward_backward_custom(DATA, nll).result()
    client.optim_step(STEP).result()
    changes = client.progress()
    assert changes["scaled"] == pytest.approx(changes["l2"], rel=1e-3)


def test_terms_of_logits_on_the_engine(local: LocalTrainingClient) -> None:
    def peak(_: Any, __: Any, logits: Sequence[Tensor]) -> Tensor:
        return torch.cat([rows.amax(-1) for rows in logits]).mean()

    class WithState(Moving):
        name = "with state"

        def compute(self, data: Any, logprobs: Any, logits: Any = None) -> Tensor:
            return super().compute(data, logprobs)

    specs = [
        RegularizerSpec(peak, 0.1, "peak", needs=("logits",)),
        RegularizerSpec(WithState(), 0.1, needs=("logits",)),
    ]
    client = regularize(local, specs, measure_progress=1)
    values = []
    for _ in range(2):
        output = client.forward_backward_custom(DATA, nll).result()
        values.append(output.regularizers["peak"].value)
        client.optim_step(STEP).result()
        if len(values) == 1:
            first = client.progress()
    assert first["peak"] == pytest.approx(values[1] - values[0], rel=1e-3)
    assert "with state" not in first  # its logits before the step are gone


def test_a_term_that_fails_is_left_out(either: Any) -> None:
    calls = []

    def fragile(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("only once")
        return logprobs[0].sum()

    client = regularize(either, [RegularizerSpec(fragile, 0.1, "fragile"), L2], measure_progress=1)
    client.forward_backward_custom(DATA, nll).result()
    client.optim_step(STEP).result()
    assert client.progress().keys() == {"base", "l2"}


def test_a_state_that_cannot_be_copied_is_left_out(either: Any) -> None:
    class Single(Moving):
        def __deepcopy__(self, memo: object) -> Any:
            raise TypeError("there is one")

    client = regularize(either, [RegularizerSpec(Single(), 0.1), L2], measure_progress=1)
    client.forward_backward_custom(DATA, nll).result()
    client.optim_step(STEP).result()
    assert client.progress().keys() == {"base", "l2"}


def test_a_base_loss_with_state(either: Any) -> None:
    client = regularize(either, [L2], measure_progress=1)
    moving = Moving()
    client.forward_backward_custom(DATA, moving).result()
    means = [value_of(either, lambda _, rows: torch.cat(rows).mean())]
    client.optim_step(STEP).result()
    means.append(value_of(either, lambda _, rows: torch.cat(rows).mean()))
    # Before and after with one and the same state: the one that the call has left.
    expected = (means[1] - moving.mean) ** 2 - (means[0] - moving.mean) ** 2
    assert client.progress()["base"] == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_a_redefined_term_without_a_value_before_the_step_is_left_out(either: Any) -> None:
    class Once:
        """Is measured after the step, and fails when it is measured as before it."""

        name = "once"
        calls = 0

        def compute(self, data: Any, logprobs: Any) -> Tensor:
            return 100 * l2(data, logprobs)

        def measure(self, data: Any, logprobs: Any) -> Tensor:
            Once.calls += 1
            if Once.calls > 1:
                raise ValueError("only once")
            return l2(data, logprobs)

    client = regularize(either, [RegularizerSpec(Once(), 0.1), L2], measure_progress=1)
    client.forward_backward_custom(DATA, nll).result()
    client.optim_step(STEP).result()
    assert client.progress().keys() == {"base", "l2"}


def test_there_is_nothing_to_measure_without_a_call(either: Any) -> None:
    client = regularize(either, measure_progress=1)
    assert client.progress() == {}
    client.optim_step(STEP).result()
    assert client.progress() == {}


@pytest.mark.parametrize("every", [-1, 0.5, True])
def test_the_number_of_steps_is_checked(local: LocalTrainingClient, every: Any) -> None:
    with pytest.raises(SpecError, match=r"measure_progress must be a whole number >= 0, got "):
        regularize(local, measure_progress=every)
