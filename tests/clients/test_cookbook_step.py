"""tinker-cookbook's own `train_step` with a wrapped client, against a step written by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.train import train_step
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from torch import Tensor

from steelyard import RegularizerSpec, regularize
from steelyard.regularizers import Entropy, KLToReference
from tests.clients.sdk import Answered
from tests.engine.by_hand import ByHand

RATE = 0.01
PROMPT = [1, 2, 3]
ANSWERS = [[4, 5, 6], [7, 8], [9, 9, 4, 5], [6]]
REWARDS = [1.0, 0.0, 0.5, 0.25]


def rollouts(client: Any) -> list[types.Datum]:
    """Data that the cookbook makes of one group, sampled from a policy nearby."""
    trajectories = []
    for answer, reward in zip(ANSWERS, REWARDS, strict=True):
        tokens = [*PROMPT, *answer]
        whole = types.Datum(
            types.ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": tokens[1:]},  # type: ignore[dict-item]
        )
        (out,) = client.forward([whole], "cross_entropy").result().loss_fn_outputs
        old = [lp - 0.1 for lp in out["logprobs"].tolist()[-len(answer) :]]
        action = TokensWithLogprobs(answer, old)
        step = Transition(types.ModelInput.from_ints(PROMPT), action, reward, True)
        trajectories.append(Trajectory([step], types.ModelInput.from_ints([])))
    count = len(ANSWERS)
    groups = [TrajectoryGroup(trajectories, [0.0] * count, [{}] * count)]
    data, _ = assemble_training_data(groups, compute_advantages(groups))
    return data


def by_hand(rows: list[Tensor], data: list[types.Datum]) -> Tensor:
    """Importance sampling, 2 · ½ mean δ² against the sampling policy, and a bonus for entropy.

    The means run over the tokens of the answers: where the cookbook's own mask is 1.
    """
    fields = {
        name: torch.cat([each.loss_fn_inputs[name].to_torch() for each in data])
        for name in ("logprobs", "advantages", "mask")
    }
    flat, answers = torch.cat(rows), fields["mask"] > 0
    base = -(torch.exp(flat - fields["logprobs"]) * fields["advantages"]).sum()
    delta = (flat - fields["logprobs"])[answers]
    return base + 2.0 * 0.5 * delta.square().mean() + 0.3 * 0.5 * flat[answers].square().mean()


@pytest.mark.parametrize("substeps", [1, 2])
def test_the_weights_after_a_step_are_those_of_the_loss_with_the_terms(
    either: Any, substeps: int
) -> None:
    below = either.engine if isinstance(either, Answered) else either
    data = rollouts(either)
    hand = ByHand(below.weights(), 2, torch.float32)
    terms = [
        RegularizerSpec(KLToReference(reference="logprobs"), 2.0, "kl"),
        RegularizerSpec(Entropy(mode="bonus"), 0.3, "entropy"),
    ]
    client = regularize(either, terms)
    logprobs = asyncio.run(train_step(data, client, RATE, substeps, "importance_sampling"))
    assert [len(row) for row in logprobs] == [len(PROMPT) + len(a) - 1 for a in ANSWERS]
    assert client.optim_steps == substeps

    parameters = list(hand.weights.values())
    # Of the parameters Tinker's AdamW has, the cookbook sets these.
    adam = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    size = len(data) // substeps
    for batch in [data[i : i + size] for i in range(0, len(data), size)]:
        adam.zero_grad()
        by_hand(hand.logprobs(batch), batch).backward()  # type: ignore[no-untyped-call]
        adam.step()
    found = below.weights()
    for key, expected in hand.weights.items():
        # Adam divides by the size of a gradient, so that rounding shows where it is nearly 0.
        close = torch.isclose(found[key], expected, rtol=1e-3, atol=RATE / 50)
        assert close.float().mean() > 0.99, key
