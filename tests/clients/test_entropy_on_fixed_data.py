"""Entropy on fixed data with a training client: exact on the engine, an error elsewhere.

The entropy that a model really has is computed by plain transformers over its whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tinker import types
from torch import Tensor

from steelyard import CustomLossOutput, RegularizerSpec, regularize
from steelyard.composition.terms import UncomparedTermWarning
from steelyard.engine import LocalTrainingClient
from steelyard.errors import SpecError, TermError
from steelyard.regularizers import Adaptive, ConfidencePenalty, Entropy
from tests.clients.sdk import Answered, engine
from tests.engine.by_hand import ByHand, datum

TOKENS = [[3, 9, 27, 81, 243, 200, 17], [5, 25, 125, 100, 11], [8, 8, 64, 31, 16, 7]]
WEIGHTS = [[0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [1.0] * 4, [0.0, 0.0, 1.0, 1.0, 1.0]]
DATA = [
    datum(tokens[:-1], tokens[1:], weights=w) for tokens, w in zip(TOKENS, WEIGHTS, strict=True)
]
STEP = types.AdamParams(learning_rate=0.01)


def entropies(weights: Any, dtype: torch.dtype = torch.float64) -> tuple[ByHand, Tensor]:
    """Entropy of each token that counts, over the whole vocabulary, by transformers."""
    hand = ByHand({key: w.to(dtype) for key, w in weights.items()}, 2, dtype)
    rows = [
        hand.logits(d.model_input.to_ints())[torch.tensor(w) != 0].log_softmax(-1)
        for d, w in zip(DATA, WEIGHTS, strict=True)
    ]
    every = torch.cat(rows)
    return hand, -(every.exp() * every).sum(-1)


def true_entropy(client: LocalTrainingClient) -> float:
    return entropies(client.weights())[1].mean().item()


def nothing(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return 0 * torch.cat(list(logprobs)).sum()


def nll(_: Any, logprobs: Sequence[Tensor]) -> Tensor:
    return -torch.cat(list(logprobs)).mean()


def run(
    client: LocalTrainingClient,
    steps: int,
    base: Any,
    *specs: RegularizerSpec,
    step: types.AdamParams = STEP,
) -> list[CustomLossOutput]:
    outputs, wrapped = [], regularize(client, list(specs))
    for _ in range(steps):
        outputs.append(wrapped.forward_backward_custom(DATA, base).result())
        wrapped.optim_step(step).result()
    return outputs


@pytest.fixture(scope="module")
def sharp() -> LocalTrainingClient:
    """A client after 15 steps on the data: far from the uniform distribution it began with."""
    client = engine(dtype="float64")
    run(client, 15, nll)
    return client


def copy(client: LocalTrainingClient, **options: Any) -> LocalTrainingClient:
    """A client with the same weights and no optimizer state."""
    other = engine(dtype="float64", **options)
    with torch.no_grad():
        for key, weight in other._trainer.adapter.parameters.items():
            weight.copy_(client.weights()[key])
    return other


@pytest.mark.parametrize("max_tokens", [None, 8])  # 8: the model runs forward once more
@pytest.mark.parametrize("need", ["logits", "projection"])
@pytest.mark.parametrize("kind", ["penalty", "bonus", "confidence"])
def test_value_and_gradient_are_those_of_the_whole_vocabulary(
    sharp: LocalTrainingClient, kind: Any, need: str, max_tokens: int | None
) -> None:
    client = copy(sharp, max_tokens=max_tokens)
    hand, each = entropies(client.weights())
    term: Any = Entropy(mode=kind) if kind != "confidence" else None
    value = -each.mean() if kind == "bonus" else each.mean()
    if term is None:  # some tokens are below the threshold, some above
        threshold = each.mean().item()
        term, value = ConfidencePenalty(threshold=threshold), (threshold - each).clamp_min(0).mean()
    spec = RegularizerSpec(term, 0.7, "entropy", needs=(need,))
    client_with_term = regularize(client, [spec], track_grad_norms=True)
    output = client_with_term.forward_backward_custom(DATA, nothing).result()
    found = output.regularizers["entropy"]
    assert found.value == pytest.approx(value.item(), rel=1e-7)
    assert found.custom["entropy"] == pytest.approx(each.mean().item(), rel=1e-7)
    assert found.grad_space == need
    gradients = torch.autograd.grad(0.7 * value, list(hand.weights.values()))
    ours = client.gradients()
    for key, gradient in zip(hand.weights, gradients, strict=True):
        torch.testing.assert_close(ours[key].double(), gradient, rtol=1e-5, atol=1e-8)


def test_a_bonus_raises_the_true_entropy_and_a_penalty_lowers_it(
    sharp: LocalTrainingClient,
) -> None:
    """Alone on fixed data, where an estimate from the data's own tokens does the opposite."""
    began = true_entropy(sharp)
    moved = {}
    for mode in ("bonus", "penalty"):
        client = copy(sharp)
        run(client, 8, nothing, RegularizerSpec(Entropy(mode=mode), 1.0))
        moved[mode] = true_entropy(client) - began
    assert moved["bonus"] > 0.5
    assert moved["penalty"] < -0.5


def test_a_lower_bound_holds_the_true_entropy() -> None:
    """Without it the same training leaves half of it or less."""
    bound = RegularizerSpec(Entropy(), name="entropy", at_least=3.0)
    slow = types.AdamParams(learning_rate=0.003)
    without, held = engine(dtype="float64"), engine(dtype="float64")
    run(without, 128, nll, step=slow)
    outputs = run(held, 128, nll, bound, step=slow)
    values = [output.regularizers["entropy"].value for output in outputs[-32:]]
    assert sum(values) / len(values) == pytest.approx(3.0, abs=0.3)
    assert true_entropy(held) > 2.3
    assert true_entropy(without) < 1.5


def test_it_can_be_compared_with_respect_to_the_parameters(sharp: LocalTrainingClient) -> None:
    """In the space of the log-probs it cannot: no cosine, and an aggregator says what to do."""
    spec = RegularizerSpec(Entropy(mode="bonus"), 0.7, "entropy")
    client = regularize(copy(sharp), [spec], track_grad_norms=True, grad_space="parameters")
    output = client.forward_backward_custom(DATA, nll).result()
    hand, each = entropies(sharp.weights())
    base = -torch.cat(hand.logprobs(DATA)).mean()
    rows = []
    for value in (base, -each.mean()):
        gradients = torch.autograd.grad(value, list(hand.weights.values()), retain_graph=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    cosine = torch.nn.functional.cosine_similarity(rows[0], rows[1], dim=0).item()
    assert output.cosines["base", "entropy"] == pytest.approx(cosine, abs=1e-5)

    client = regularize(copy(sharp), [spec], track_grad_norms=True)
    with pytest.warns(UncomparedTermWarning, match="'entropy' reads logits with these"):
        client.forward_backward_custom(DATA, nll)
    output = client.forward_backward_custom(DATA, nll).result()  # once
    assert output.cosines == {}
    assert output.total_grad_norm == pytest.approx(output.base_loss.grad_norm)
    compared = regularize(copy(sharp), [spec], aggregate="upgrad")
    with pytest.raises(SpecError, match=r"to logits: give it anchor=True.*'parameters'"):
        compared.forward_backward_custom(DATA, nll)
    anchored = RegularizerSpec(spec.fn, 0.7, "entropy", anchor=True)
    for compared in (
        regularize(copy(sharp), [anchored], aggregate="upgrad"),
        regularize(copy(sharp), [spec], aggregate="upgrad", grad_space="parameters"),
    ):
        output = compared.forward_backward_custom(DATA, nll).result()
        assert output.regularizers["entropy"].value == pytest.approx(-each.mean().item(), rel=1e-6)


def test_what_a_step_did_to_it_is_measured(sharp: LocalTrainingClient) -> None:
    local = copy(sharp)
    specs = [
        RegularizerSpec(Entropy(mode="bonus"), 1.0, "entropy"),
        RegularizerSpec(Adaptive(regularizer=Entropy(), target=1.0), 0.1, "adaptive"),
    ]
    client = regularize(local, specs, measure_progress=1)
    before = true_entropy(local)
    output = client.forward_backward_custom(DATA, nothing).result()
    assert output.regularizers["adaptive"].custom["observed"] == pytest.approx(before, rel=1e-6)
    client.optim_step(STEP).result()
    assert client.progress()["entropy"] == pytest.approx(before - true_entropy(local), rel=1e-4)


def test_it_follows_the_data_of_the_call(sharp: LocalTrainingClient) -> None:
    client = regularize(copy(sharp), [RegularizerSpec(Entropy(), 0.1, "entropy")])
    sampled = [
        datum(t[:-1], t[1:], weights=w, logprobs=[-1.0] * len(w))
        for t, w in zip(TOKENS, WEIGHTS, strict=True)
    ]
    hand, each = entropies(sharp.weights())
    of_tokens = [
        row[torch.tensor(w) != 0] for row, w in zip(hand.logprobs(DATA), WEIGHTS, strict=True)
    ]
    for data, expected, space in (
        (DATA, each.mean(), "logits"),
        (sampled, -torch.cat(of_tokens).mean(), "logprobs"),
        (DATA, each.mean(), "logits"),
    ):
        found = client.forward_backward_custom(data, nll).result().regularizers["entropy"]
        assert found.value == pytest.approx(expected.item(), rel=1e-6)
        assert found.grad_space == space


def test_a_client_without_logits_refuses_fixed_data(remote: Answered) -> None:
    client = regularize(remote, [RegularizerSpec(Entropy(mode="bonus"), 0.1, "entropy")])
    with pytest.raises(TermError, match=r"steelyard\.engine.*sampling log-probs, importance="):
        client.forward_backward_custom(DATA, nll)
    assert [name for name, _ in remote.sent] == ["forward"]
    skipped = RegularizerSpec(ConfidencePenalty(), 0.1, on_error="skip")
    output = regularize(remote, [skipped]).forward_backward_custom(DATA, nll).result()
    assert "takes tokens that the model sampled" in output.skipped["confidence_penalty"]
