"""Policies at a temperature through the real SDK: with named, custom and uploaded losses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import tinker
import torch
from tinker import types

from steelyard import RegularizerSpec, regularize
from steelyard.engine import LocalServiceClient, training_client
from steelyard.errors import SpecError
from steelyard.regularizers import L2
from tests.engine.data import SMALL, by_hand, datum, logprobs

T = 0.7
POLICY = [
    datum([1, 2, 3], weights=[1.0] * 3, logprobs=[-6.4, -6.5, -6.2], advantages=[0.1, -1.0, 0.5]),
    datum([4, 5], weights=[1.0] * 2, logprobs=[-6.3, -6.1], advantages=[-0.2, 0.3]),
]


def at(weights: Any, temperature: float = T) -> list[torch.Tensor]:
    """Log-probs of `POLICY` by plain transformers, logits / T before log-softmax."""
    found = []
    with torch.no_grad():
        for each in POLICY:
            targets = each.loss_fn_inputs["target_tokens"].to_torch()
            logits = by_hand(weights, each.model_input.to_ints()).logits[0]
            rows = (logits / temperature).log_softmax(-1)
            found.append(rows.gather(-1, targets[:, None])[:, 0])
    return found


def ppo(rows: Sequence[torch.Tensor]) -> float:
    total = 0.0
    for each, row in zip(POLICY, rows, strict=True):
        inputs = each.loss_fn_inputs
        then, a = inputs["logprobs"].to_torch(), inputs["advantages"].to_torch()
        ratio = (row - then).exp()
        total -= float(torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum())
    return total


@pytest.fixture
def twin(local: LocalServiceClient) -> Any:
    """The engine in this process, with the weights of `training`."""
    return local.create_lora_training_client("tiny-random", rank=4, seed=0)


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_named_losses_take_a_temperature(
    training: tinker.TrainingClient, twin: Any, name: Any
) -> None:
    config = {"temperature": T}
    for verb in ("forward", "forward_backward"):
        served = getattr(training, verb)(POLICY, name, config).result()
        expected = getattr(twin, verb)(POLICY, name, config).result()
        assert served.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
        for ours, theirs in zip(logprobs(served), logprobs(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if name == "ppo":
        for ours, theirs in zip(logprobs(served), at(twin.weights()), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert served.metrics["loss:sum"] == pytest.approx(ppo(at(twin.weights())), rel=1e-4)
    step, other = training.optim_step(SMALL).result(), twin.optim_step(SMALL).result()
    assert step.metrics == pytest.approx(other.metrics, rel=1e-5)  # the norm of the gradient


@pytest.mark.parametrize("server_side", [False, True])
def test_terms_are_of_the_policy_at_the_temperature_in_one_and_in_two_passes(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient, twin: Any, *, server_side: bool
) -> None:
    terms = [RegularizerSpec(L2(), weight=0.3, name="l2")]
    client = regularize(training, terms, True, temperature=T, service=sdk, server_side=server_side)
    mine = regularize(twin, terms, True, temperature=T)
    for _ in range(2):
        rows = at(twin.weights())
        served, expected = (each.forward_backward(POLICY, "ppo") for each in (client, mine))
        step, other = client.optim_step(SMALL).result(), mine.optim_step(SMALL).result()
        output = served.result()
        assert client.explain().passes == output.passes == (1 if server_side else 2)
        assert output.base_loss.value == pytest.approx(ppo(rows), rel=1e-4)
        squares = torch.cat(rows).square().mean().item()
        assert output.regularizers["l2"].value == pytest.approx(squares, rel=1e-4)
        assert output.cosines == pytest.approx(expected.result().cosines, rel=1e-3, abs=1e-4)
        assert step.metrics == pytest.approx(other.metrics, rel=1e-4)


def test_uploaded_losses_take_a_temperature_from_coroutines(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient, twin: Any
) -> None:
    terms = [RegularizerSpec(L2(), weight=0.3, name="l2")]
    client = regularize(training, terms, temperature=T, service=sdk, server_side=True)

    async def step() -> Any:
        return await (await client.forward_backward_async(POLICY, "ppo"))

    output = asyncio.run(step())
    assert output.passes == 1
    assert output.base_loss.value == pytest.approx(ppo(at(twin.weights())), rel=1e-4)


def test_an_uploaded_loss_takes_no_temperature_of_0(
    sdk: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    def loss(logprobs: torch.Tensor) -> Any:
        return logprobs.square().sum(), {}

    handle = sdk.create_custom_loss(loss, {"logprobs": 1}).result()
    config: dict[str, float | str] = {"loss_id": str(handle.loss_id), "temperature": 0.0}
    with pytest.raises(tinker.TinkerError, match=r"'temperature'.* must be a finite number > 0"):
        training.forward_backward(POLICY, "custom", config).result()


@pytest.mark.parametrize("ignores", [False, True])
def test_a_server_that_has_no_temperatures_is_noticed(
    training: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch, *, ignores: bool
) -> None:
    """It refuses the key of `loss_fn_config`, as ours once did, or ignores it."""

    def without(config: Any) -> tuple[float, Any]:
        kept = {k: v for k, v in (config or {}).items() if not (ignores and k == "temperature")}
        return 1.0, kept

    monkeypatch.setattr(training_client, "split_temperature", without)
    reason = "the same log-probs with it" if ignores else "got the key 'temperature'"
    with pytest.raises(SpecError, match=reason):
        regularize(training).check_temperature(T)


def test_our_own_server_has_temperatures(training: tinker.TrainingClient) -> None:
    regularize(training).check_temperature(T)
    sampling = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=12, temperature=T, seed=3)
    sequence = sampling.sample(types.ModelInput.from_ints([7, 8]), 1, params).result().sequences[0]
    tokens = [7, 8, *sequence.tokens]
    output = training.forward(
        [datum(tokens[:-1], tokens[1:], weights=[1.0] * (len(tokens) - 1))],
        "cross_entropy",
        {"temperature": T},
    ).result()
    ratios = (logprobs(output)[0][1:] - torch.tensor(sequence.logprobs)).exp()
    torch.testing.assert_close(ratios, torch.ones_like(ratios), rtol=0, atol=1e-5)
