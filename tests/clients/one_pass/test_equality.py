"""One pass and two give the same numbers, step by step, for every term that lowers.

Over the real SDK, a real connection and a real server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tinker
import torch
from tinker import types

from steelyard import RegularizerSpec, regularize
from steelyard.composition.named_losses import RewardPart
from steelyard.experiment.training.base_losses import CrossEntropy, PolicyLoss
from steelyard.regularizers import (
    L1,
    L2,
    NLL,
    ChosenNLL,
    ConfidencePenalty,
    ElasticNet,
    Entropy,
    JSToReference,
    KLToReference,
    OverlongPenalty,
    RelativeLength,
    SquaredLogRatio,
)
from steelyard.spec.schedules import cosine, linear

from .batches import STEP, assert_same, batch

STEPS = 6


def named(*terms: Any) -> list[RegularizerSpec]:
    """Specs of terms, each with a schedule of its own."""
    return [
        RegularizerSpec(
            term,
            linear(0.1, 0.4 + 0.1 * place, STEPS) if place % 2 else cosine(0.5, 0.0, STEPS),
            f"Term {place}/ü",
        )
        for place, term in enumerate(terms)
    ]


TOKENS = {
    "sparsity": named(
        L1(), L1(of="probs", reduction="sum"), L2(clip=6.0), L2(center=-5.0, of="probs"),
        ElasticNet(l1_ratio=0.3),
    ),
    "reference": named(
        KLToReference(), KLToReference(estimator="k2"), KLToReference(estimator="k3"),
        KLToReference(level="sequence"), JSToReference(), SquaredLogRatio(),
    ),
    "entropy": named(
        Entropy(), Entropy(mode="bonus", normalize=True, vocabulary=512), Entropy(level="sequence"),
        Entropy(importance="logprobs"), Entropy(importance="logprobs", level="sequence"),
    ),
    "off policy": named(
        KLToReference(importance="logprobs"),
        KLToReference(importance="logprobs", estimator="k1"),
        KLToReference(importance="logprobs", estimator="k2"),
        KLToReference(importance="logprobs", level="sequence", estimator="k1"),
    ),
    "length and pairs": named(
        OverlongPenalty(max_length=6, buffer=4), RelativeLength(correct="reward", scale="std"),
        ChosenNLL(), ChosenNLL(pair="group"), NLL(),
    ),
}  # fmt: skip
CLASSES = {
    "classes": named(
        KLToReference(), KLToReference(direction="reverse"), KLToReference(direction="symmetric"),
        JSToReference(), Entropy(temperature=0.7), Entropy(mode="bonus"), ConfidencePenalty(), L1(),
    ),
}  # fmt: skip


def train_both(
    clients: Sequence[Any], data: Any, base: Any, specs: Sequence[RegularizerSpec], steps: int
) -> None:
    ways = [
        regularize(client, specs, track_grad_norms=True, server_side=side)
        for client, side in zip(clients, (True, False), strict=True)
    ]
    for step in range(steps):
        outputs, updates = [], []
        for client in ways:
            if isinstance(base, str):
                future = client.forward_backward(data(step), base)
            else:
                future = client.forward_backward_custom(data(step), base)
            updates.append(client.optim_step(STEP))
            outputs.append(future.result())
        found, expected = outputs
        assert (found.passes, expected.passes) == (1, 2)
        assert_same(found, expected)
        # Of the gradients of all weights.
        norms = [update.result().metrics for update in updates]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("group", TOKENS)
def test_terms_of_tokens(
    training: tinker.TrainingClient, other: tinker.TrainingClient, group: str
) -> None:
    def data(step: int) -> Any:
        return batch(step, weights=step % 3 > 0)

    train_both([training, other], data, "importance_sampling", TOKENS[group], STEPS)


def test_a_kl_on_sampled_and_on_fixed_data(
    training: tinker.TrainingClient, other: tinker.TrainingClient
) -> None:
    """By turns: data with sampling log-probs and without have graphs of their own."""
    one, two = (
        regularize(client, named(KLToReference()), track_grad_norms=True, server_side=side)
        for client, side in ((training, True), (other, False))
    )
    for step in range(4):
        data = batch(step, logprobs=step % 2 == 0)
        found, expected = (
            client.forward_backward(data, "cross_entropy").result() for client in (one, two)
        )
        assert found.passes == 1
        assert_same(found, expected, near=1e-6)
        (kl,) = found.regularizers.values()
        sampled, fixed = {"k1", "k2", "k3"}, {"log_ratio", "half_squared_log_ratio"}
        assert kl.custom.keys() == (fixed if step % 2 else sampled)
        updates = [client.optim_step(STEP).result().metrics for client in (one, two)]
        assert updates[0] == pytest.approx(updates[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("group", CLASSES)
def test_terms_of_classes(
    training: tinker.TrainingClient, other: tinker.TrainingClient, group: str
) -> None:
    def data(step: int) -> Any:
        return batch(step, width=5)

    train_both([training, other], data, "cross_entropy", CLASSES[group], STEPS)


def nll(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """A custom loss as users write it."""
    rows = zip(data, logprobs, strict=True)
    loss = torch.stack(
        [-(row * d.loss_fn_inputs["weights"].to_torch()).sum() for d, row in rows]
    ).mean()
    return loss, {"nll": loss.item(), "data": float(len(data))}


def confidence(_: Any, logprobs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(logprobs).exp().mean()


@pytest.mark.parametrize(
    "base",
    [
        "ppo",
        "cispo",
        "dro",
        "gspo",
        CrossEntropy(reduction="sum"),
        CrossEntropy(),
        PolicyLoss.of("ppo"),
        PolicyLoss.of("importance_sampling", {"reduction": "sum"}),
        nll,
    ],
)
def test_base_losses(
    training: tinker.TrainingClient, other: tinker.TrainingClient, base: Any
) -> None:
    specs = [*named(L2()), RegularizerSpec(confidence, weight=2.0, name="confidence")]
    train_both([training, other], batch, base, specs, steps=3)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "dro", "gspo"])
def test_parts_of_a_base_loss_by_reward(
    training: tinker.TrainingClient, other: tinker.TrainingClient, name: str
) -> None:
    base = PolicyLoss.of(name)
    specs = [
        RegularizerSpec(RewardPart(base, "reference_logprobs"), 0.0, "rewards/one"),
        RegularizerSpec(RewardPart(base), 0.0, "base_loss/remainder"),
    ]
    train_both([training, other], batch, base, specs, steps=2)


def test_untracked(training: tinker.TrainingClient, other: tinker.TrainingClient) -> None:
    specs = TOKENS["reference"]
    one = regularize(training, specs, server_side=True)
    two = regularize(other, specs, server_side=False)
    for step in range(3):
        found, expected = (
            client.forward_backward(batch(step), "cross_entropy").result() for client in (one, two)
        )
        assert found.term_gradients is None
        assert_same(found, expected)
        updates = [client.optim_step(STEP).result().metrics for client in (one, two)]
        assert updates[0] == pytest.approx(updates[1], rel=1e-4, abs=1e-6)


def without_weights(data: list[types.Datum], *places: int) -> list[types.Datum]:
    """Data of which some have no token that counts."""
    for place in places:
        weights = data[place].loss_fn_inputs["weights"].to_torch()
        data[place].loss_fn_inputs["weights"] = types.TensorData.from_torch(weights * 0)
    return data


@pytest.mark.parametrize("width", [None, 1])
@pytest.mark.parametrize("empty", [(), (0,), (0, 1)])
def test_odd_batches(
    training: tinker.TrainingClient,
    other: tinker.TrainingClient,
    width: int | None,
    empty: tuple[int, ...],
) -> None:
    def data(_: int) -> list[types.Datum]:
        return without_weights(batch(width=width, lengths=[1, 3]), *empty)

    specs = CLASSES["classes"] if width else TOKENS["reference"]
    train_both([training, other], data, "cross_entropy", specs, steps=1)


@pytest.mark.parametrize("group", [*TOKENS, *CLASSES])
def test_a_batch_without_a_counted_token_leaves_the_terms_out(
    training: tinker.TrainingClient, other: tinker.TrainingClient, group: str
) -> None:
    """A function of the user sees all tokens, and stays."""
    width, terms = (5, CLASSES[group]) if group in CLASSES else (None, TOKENS[group])
    specs = [*terms, RegularizerSpec(confidence, weight=2.0, name="confidence")]
    one, two = (
        regularize(client, specs, track_grad_norms=True, server_side=side)
        for client, side in ((training, True), (other, False))
    )
    for empty in (range(4), (), range(4)):
        data = without_weights(batch(width=width, lengths=[2, 3, 4, 5]), *empty)
        found, expected = (
            client.forward_backward(data, "cross_entropy").result() for client in (one, two)
        )
        assert (found.passes, expected.passes) == (1, 2)
        assert found.not_run == (tuple(spec.name for spec in terms) if empty else ())
        assert_same(found, expected)
        updates = [client.optim_step(STEP).result().metrics for client in (one, two)]
        assert updates[0] == pytest.approx(updates[1], rel=1e-4, abs=1e-6)


def test_a_batch_in_several_requests(
    training: tinker.TrainingClient,
    other: tinker.TrainingClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The SDK adds up the metrics of the parts."""
    config = training.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    monkeypatch.setattr(training.holder, "_client_config", config)
    train_both([training, other], batch, "cross_entropy", TOKENS["sparsity"], steps=2)
