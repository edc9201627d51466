"""Policies at a temperature: on the engine, through the SDK's client, and elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker
import torch
from tinker import types
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalTrainingClient
from steelyard.errors import InputError, SpecError
from tests.clients.sdk import Answered, engine
from tests.engine.by_hand import ByHand, datum

T = 0.7
DATA = [
    datum([1, 2, 3], [2, 3, 4], logprobs=[-6.0, -6.4, -6.1], advantages=[0.0, 1.0, -0.5]),
    datum([9, 8], [8, 7], logprobs=[-6.3, -6.2], advantages=[0.4, 0.2]),
]
STEP = types.AdamParams(learning_rate=0.05)
RULE = "temperature must be 1 for a client whose server computes log-probs at temperature 1 alone"


def squares(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(logprobs)).square().mean()


def total(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logprobs)).sum()


SQUARES = RegularizerSpec(squares, 0.3, "squares")


def at(client: Any, temperature: float = T) -> list[Tensor]:
    """Log-probs of `DATA` by plain transformers, logits / T before log-softmax."""
    trained = getattr(client, "engine", client)

    class AtTemperature(ByHand):
        def logits(self, tokens: Sequence[int]) -> Tensor:
            return super().logits(tokens) / temperature

    with torch.no_grad():
        return AtTemperature(trained.weights(), 2, torch.float32).logprobs(DATA)


def sampled(name: str) -> list[Tensor]:
    return [each.loss_fn_inputs[name].to_torch() for each in DATA]


def importance_sampling(rows: Sequence[Tensor]) -> float:
    parts = zip(rows, sampled("logprobs"), sampled("advantages"), strict=True)
    return sum(float(-((row - then).exp() * a).sum()) for row, then, a in parts)


def test_custom_losses_and_terms_read_logprobs_at_the_temperature(either: Any) -> None:
    rows = at(either)
    output = (
        regularize(either, temperature=T).forward_backward_custom(DATA, total, [SQUARES]).result()
    )
    assert output.base_loss.value == pytest.approx(total(None, rows).item(), rel=1e-5)
    value = output.regularizers["squares"].value
    assert value == pytest.approx(squares(None, rows).item(), rel=1e-5)
    one = regularize(either).forward_backward_custom(DATA, total, [SQUARES]).result()
    assert abs(one.regularizers["squares"].value - value) > 0.01


def test_the_gradient_of_a_policy_at_a_temperature_is_the_same_in_one_and_in_two_passes(
    remote: Answered,
) -> None:
    local = engine()
    outputs: list[Any] = []
    for client, trained in ((local, local), (remote, remote.engine)):
        wrapped = regularize(client, [SQUARES], temperature=T)
        outputs.append(wrapped.forward_backward(DATA, "importance_sampling").result())
        outputs.append(trained.gradients())
    first, ours, second, theirs = outputs
    assert first.loss_total == pytest.approx(second.loss_total, rel=1e-5)
    rows = at(local)
    expected = importance_sampling(rows) + 0.3 * squares(None, rows).item()
    assert first.loss_total == pytest.approx(expected, rel=1e-5)
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("regularizers", [[], [SQUARES]])
def test_the_temperature_is_that_of_the_call_or_else_of_the_client(
    either: Any, regularizers: list[Any]
) -> None:
    wrapped = regularize(either, regularizers, temperature=1.4)

    def loss(call: Any) -> float:
        metrics: dict[str, float] = call.result().metrics
        return metrics["base_loss/value" if regularizers else "loss:sum"]

    found = [
        loss(wrapped.forward_backward(DATA, "importance_sampling")),
        loss(wrapped.forward_backward(DATA, "importance_sampling", {"temperature": T})),
        loss(wrapped.forward_backward(DATA, "ppo", {"temperature": 1, "clip_low_threshold": 0})),
    ]

    async def call(*config: Any) -> Any:
        return await wrapped.forward_backward_async(DATA, "importance_sampling", *config)

    found += [loss(asyncio.run(call())), loss(asyncio.run(call({"temperature": T})))]
    own, other = importance_sampling(at(either, 1.4)), importance_sampling(at(either, T))
    assert [found[i] for i in (0, 1, 3, 4)] == pytest.approx([own, other, own, other], rel=1e-5)
    plain = zip(at(either, 1.0), sampled("logprobs"), sampled("advantages"), strict=True)
    clipped = sum(
        float(-torch.minimum((ratio := (row - then).exp()) * a, ratio.clamp(0, 1.2) * a).sum())
        for row, then, a in plain
    )
    assert found[2] == pytest.approx(clipped, rel=1e-5)


def test_measured_progress_is_of_the_policy_at_the_temperature(either: Any) -> None:
    client = regularize(either, temperature=T, measure_progress=1)
    before = squares(None, at(either)).item()
    client.forward_backward_custom(DATA, total, [SQUARES]).result()
    client.optim_step(STEP).result()
    after = squares(None, at(either)).item()
    assert abs(after - before) > 0.1
    assert client.progress()["squares"] == pytest.approx(after - before, rel=1e-4)


def test_measured_progress_of_a_term_over_logits_is_of_the_policy_at_the_temperature(
    local: LocalTrainingClient,
) -> None:
    def highest(_: Any, __: Any, logits: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(logits)).max()

    def by_hand() -> float:
        hand = ByHand(local.weights(), 2, torch.float32)
        logits = [hand.logits(each.model_input.to_ints()) for each in DATA]
        return torch.cat(logits).max().item() / T

    spec = RegularizerSpec(highest, 0.3, "highest", needs=("logits",))
    client = regularize(local, temperature=T, measure_progress=1)
    before = by_hand()
    client.forward_backward_custom(DATA, total, [spec]).result()
    client.optim_step(STEP).result()
    assert client.progress()["highest"] == pytest.approx(by_hand() - before, rel=1e-4)


class Elsewhere(Answered):
    """The SDK's client with a server that has no temperatures."""

    refuses = False

    def forward(self, data: Any, loss_fn: Any, loss_fn_config: Any = None) -> Any:
        if self.refuses and loss_fn_config:
            request = httpx.Request("POST", "http://elsewhere")
            response = httpx.Response(400, request=request)
            raise tinker.BadRequestError("unknown key 'temperature'", response, None)
        return super().forward(data, loss_fn)

    def forward_backward(self, data: Any, loss_fn: Any, loss_fn_config: Any = None) -> Any:
        return super().forward_backward(data, loss_fn)


@pytest.mark.parametrize(
    ("refuses", "reason"),
    [(False, "it computes the same log-probs with it"), (True, "unknown key 'temperature'")],
)
def test_a_server_without_temperatures_is_an_error_before_the_first_gradient(
    remote: Answered, refuses: bool, reason: str
) -> None:
    elsewhere = Elsewhere(remote.engine, remote.holder)  # type: ignore[arg-type]  # the fake one
    elsewhere.refuses = refuses
    client = regularize(elsewhere, [SQUARES])
    calls: list[Callable[[], object]] = [
        lambda: client.forward_backward_custom(DATA, total, temperature=T),
        lambda: asyncio.run(client.forward_backward_custom_async(DATA, total, temperature=T)),
        lambda: client.forward_backward(DATA, "ppo", {"temperature": T}),
        lambda: client.check_temperature(T),
    ]
    for call in calls:
        with pytest.raises(SpecError, match=RULE) as raised:
            call()
        assert reason in str(raised.value)
    with pytest.raises(SpecError, match=RULE):
        regularize(elsewhere, temperature=T).forward_backward(DATA, "ppo")
    assert all(kind == "forward" for kind, _ in elsewhere.sent)
    output = regularize(elsewhere).forward_backward_custom(DATA, total).result()
    assert output.base_loss.value == pytest.approx(total(None, at(remote, 1.0)).item(), rel=1e-5)


def test_a_server_is_asked_once_and_only_if_there_is_a_temperature(remote: Answered) -> None:
    client = regularize(remote)
    client.forward_backward_custom(DATA, total).result()
    assert [kind for kind, _ in remote.sent] == ["forward", "forward_backward"]
    remote.sent.clear()
    for _ in range(2):
        client.forward_backward_custom(DATA, total, temperature=T).result()
    calls = [(kind, len(data)) for kind, data in remote.sent]
    own = [("forward", 2), ("forward_backward", 2)]
    assert calls == [("forward", 8), ("forward", 8), *own, *own]


def test_a_server_that_cannot_be_reached_is_no_refusal(
    remote: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: Any) -> Any:
        raise tinker.APIConnectionError(request=httpx.Request("POST", "http://elsewhere"))

    plain = remote.forward
    monkeypatch.setattr(
        remote, "forward", lambda *args: unreachable() if args[2:] else plain(*args)
    )
    with pytest.raises(tinker.APIConnectionError):
        regularize(remote).check_temperature(T)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "hot"])
def test_a_temperature_is_a_finite_number_above_0(local: LocalTrainingClient, value: Any) -> None:
    with pytest.raises(SpecError, match="temperature must be a finite number > 0, got"):
        regularize(local, temperature=value)
    client = regularize(local, [SQUARES])
    with pytest.raises(SpecError, match="temperature must be a finite number > 0, got"):
        client.forward_backward_custom(DATA, total, temperature=value)
    with pytest.raises(InputError, match="must be a finite number > 0, got"):
        client.forward_backward(DATA, "ppo", {"temperature": value})


def test_a_traced_loss_runs_at_temperature_1(remote: Answered) -> None:
    handle: Any = SimpleNamespace(name="mine", graph=None, loss_id="1")
    with pytest.raises(SpecError, match=r"temperature must be 1 for a traced loss, got 0\.7"):
        regularize(remote, temperature=T).forward_backward_custom(DATA, handle)
    with pytest.raises(SpecError, match="temperature must be 1 for a traced loss"):
        asyncio.run(regularize(remote).forward_backward_custom_async(DATA, handle, temperature=T))
