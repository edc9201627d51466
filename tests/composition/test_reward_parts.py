"""The parts of a base loss by reward add up to it: values and gradients, also with clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import Pipeline, RegularizerSpec
from steelyard.composition.advantages import advantages
from steelyard.composition.named_losses import LOSSES, NamedBaseLoss, RewardPart
from steelyard.composition.per_datum import Separable
from steelyard.errors import InputError

REWARDS = ("correct", "brief", "polite")
LINEAR = ("importance_sampling", "ppo", "cispo", "gspo")
GSPO = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def policy_batch(seed: int, length: int = 12) -> tuple[list[Any], list[Tensor]]:
    """Two groups of four answers with advantages of GRPO, half of their ratios clipped."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    groups = [{name: draw(4).tolist() for name in REWARDS} for _ in range(2)]
    found = advantages(groups, "grpo", {"correct": 1.0, "brief": 0.5, "polite": 2.0})
    data, logprobs = [], []
    for total, by_reward in zip(found.total, found.by_reward, strict=True):
        for answer in range(4):
            sampled, answered = -draw(length).abs() - 0.1, torch.ones(length, dtype=torch.float64)
            answered[:3] = 0  # the prompt
            sampled[:3] = 0
            fields = {"logprobs": sampled, "advantages": total[answer] * answered}
            fields |= {name: part[answer] * answered for name, part in by_reward.items()}
            data.append({"loss_fn_inputs": fields})
            logprobs.append(sampled + 0.3 * draw(length))
    return data, logprobs


def gradients(name: str, seed: int) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Gradient of the base loss, and gradients and values of its parts."""
    base = NamedBaseLoss.of(name, GSPO if name == "gspo" else None)
    data, logprobs = policy_batch(seed)
    parts = {name: RewardPart(base, name) for name in REWARDS} | {"rest": RewardPart(base)}
    specs = [RegularizerSpec(part, 0.0, name, run_in="inline") for name, part in parts.items()]
    output = Pipeline(base, specs, track_grad_norms=True).compute(data, logprobs)
    assert output.term_gradients is not None
    of_terms = {name: torch.cat(rows) for name, rows in output.term_gradients.items()}
    values = {name: term.value for name, term in output.regularizers.items()}
    assert output.loss_total == output.base_loss.value
    return of_terms.pop("base"), of_terms, {**values, "base": output.base_loss.value}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LINEAR)
def test_the_gradients_of_the_rewards_add_up_to_that_of_the_loss(name: str, seed: int) -> None:
    base, parts, values = gradients(name, seed)
    assert parts.pop("rest").abs().max() == 0
    total = torch.stack(list(parts.values())).sum(0)
    assert ((total - base).norm() / base.norm()).item() < 1e-6
    assert all(part.norm() > 0.1 * base.norm() for part in parts.values())
    assert sum(values[reward] for reward in REWARDS) + values["rest"] == pytest.approx(
        values["base"]
    )


def test_dro_has_a_remainder_that_is_due_to_no_reward() -> None:
    base, parts, values = gradients("dro", 0)
    rest = parts["rest"]
    assert rest.norm() > 0
    assert ((torch.stack(list(parts.values())).sum(0) - base).norm() / base.norm()).item() < 1e-6
    data, logprobs = policy_batch(0)
    ratios = [row - datum["loss_fn_inputs"]["logprobs"] for datum, row in zip(data, logprobs)]  # noqa: B905
    torch.testing.assert_close(rest, 0.05 * torch.cat(ratios))
    assert sum(values[name] for name in (*REWARDS, "rest")) == pytest.approx(values["base"])


def test_parts_that_are_clipped_by_their_own_sign_miss_the_gradient() -> None:
    """Why each part has the clip of the total advantage."""
    data, logprobs = policy_batch(0)
    base, total = NamedBaseLoss.of("ppo"), torch.zeros(0)
    for reward in REWARDS:
        alone = [
            {"loss_fn_inputs": {**d["loss_fn_inputs"], "advantages": d["loss_fn_inputs"][reward]}}
            for d in data
        ]
        gradient = torch.cat(Pipeline(base).compute(alone, logprobs).gradients)
        total = gradient if not len(total) else total + gradient
    expected = torch.cat(Pipeline(base).compute(data, logprobs).gradients)
    assert ((total - expected).norm() / expected.norm()).item() > 0.1


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cross_entropy"])
def test_a_part_has_a_form_per_datum(name: str) -> None:
    base = NamedBaseLoss.of(name)
    data, logprobs = policy_batch(1)
    for part in (RewardPart(base, "brief"), RewardPart(base)):
        assert isinstance(part, Separable)
        form = part.per_datum(data, [row.shape for row in logprobs])
        assert (form.reduction, form.all_tokens) == ("sum", True)
        fields: dict[str, Any] = dict(form.fields)
        total = sum(
            form.values(row, **{key: rows[index].to(row) for key, rows in fields.items()}).sum()
            for index, row in enumerate(logprobs)
        )
        assert float(total) == pytest.approx(float(part.compute(data, logprobs)), rel=1e-3)


def test_equal_parts_have_equal_hashes() -> None:
    first, second = (RewardPart(NamedBaseLoss.of("ppo"), "brief") for _ in range(2))
    assert first == second != RewardPart(NamedBaseLoss.of("ppo"), "correct")
    assert hash(first) == hash(second)


def test_a_missing_part_is_an_error() -> None:
    data, logprobs = policy_batch(0)
    with pytest.raises(InputError, match=r"data\[0\].loss_fn_inputs must hold 'other', got none"):
        RewardPart(NamedBaseLoss.of("ppo"), "other").compute(data, logprobs)


def test_one_tensor_is_one_datum() -> None:
    data, logprobs = policy_batch(0)
    part = RewardPart(NamedBaseLoss.of("ppo"), "brief")
    assert part.compute(data[:1], logprobs[0]) == part.compute(data[:1], logprobs[:1])
