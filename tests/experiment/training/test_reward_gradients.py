"""The gradient of the base loss by reward, in runs: norms and cosines, in both grad spaces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from steelyard.experiment import RunFolder, train
from tests.experiment.small_runs import KL, L2, brief, letters, reward, small_rollouts

TWO = [reward(letters), reward(brief, weight=0.5)]


def first_step(folder: Path, *overrides: str, rewards: Any = TWO, terms: Any = (L2,)) -> Any:
    config = small_rollouts(
        folder, "train.steps=1", *overrides, rewards=rewards, regularizers=terms
    )
    train(config, folder / "run")
    return RunFolder(folder / "run").metrics()[0]


def check_sum(metrics: dict[str, Any], *parts: str) -> None:
    """Check that the norms and cosines are those of parts that add up to the base loss's."""
    base = metrics["base_loss/grad_norm"]
    norms = {part: metrics[f"{part}/grad_norm"] for part in parts}
    products = {part: norms[part] * metrics[f"{part}/cosines/base"] for part in parts}
    # Σ ⟨g_k, g⟩ = ⟨g, g⟩, and Σ_jk ⟨g_j, g_k⟩ = ⟨g, g⟩.
    assert math.fsum(products.values()) == pytest.approx(base, rel=1e-5)
    pairs = {
        (a, b): metrics[f"{a}/cosines/{b}"] * norms[a] * norms[b]
        for a in parts
        for b in parts
        if f"{a}/cosines/{b}" in metrics
    }
    assert len(pairs) == len(parts) * (len(parts) - 1) / 2
    squares = math.fsum(norm**2 for norm in norms.values())
    assert squares + 2 * math.fsum(pairs.values()) == pytest.approx(base**2, rel=1e-4)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
@pytest.mark.parametrize("space", ["logprobs", "parameters"])
def test_the_gradients_of_the_rewards_add_up(loss: str, space: str, tmp_path: Path) -> None:
    metrics = first_step(tmp_path, f"loss.use={loss}", f"train.grad_space={space}")
    check_sum(metrics, "rewards/letters", "rewards/brief")
    assert "rewards/letters/cosines/regularizers/l2" in metrics
    # They are no terms of the run.
    assert not [key for key in metrics if key.startswith("regularizers/rewards/")]
    assert not [key for key in metrics if key.startswith("cosines/") and "rewards" in key]
    drivers = RunFolder(tmp_path / "run").path / "drivers.jsonl"
    named = {json.loads(line)["term"] for line in drivers.read_text("utf-8").splitlines()}
    assert named <= {"base", "l2"}


def test_over_the_calls_of_a_step_they_add_up_too(tmp_path: Path) -> None:
    metrics = first_step(
        tmp_path, "train.gradient_accumulation_steps=2", "train.grad_space=parameters"
    )
    check_sum(metrics, "rewards/letters", "rewards/brief")


def test_gdpo_gives_rewards_of_different_scales_comparable_shares(tmp_path: Path) -> None:
    norms = {}
    for kind in ("grpo", "gdpo"):
        folder = tmp_path / kind
        folder.mkdir()
        metrics = first_step(folder, f"rollouts.advantage={kind}", rewards=[_loud(), TWO[0]])
        check_sum(metrics, "rewards/loud", "rewards/letters")
        norms[kind] = [metrics[f"rewards/{name}/grad_norm"] for name in ("loud", "letters")]
    assert norms["grpo"][0] > 10 * norms["grpo"][1]
    assert norms["gdpo"][0] < 4 * norms["gdpo"][1]


def _loud() -> dict[str, Any]:
    return {"use": f"{__name__}:loud", "name": "loud"}


def loud(record: Any, answer: str) -> float:
    return 1000.0 * len(answer)


def test_the_remainder_of_dro_is_shown(tmp_path: Path) -> None:
    metrics = first_step(tmp_path, "loss.use=dro")
    check_sum(metrics, "rewards/letters", "rewards/brief", "base_loss/remainder")


def test_the_only_reward_is_the_base_loss(tmp_path: Path) -> None:
    one = [reward(letters), reward(brief, enabled=False)]
    metrics = first_step(tmp_path, rewards=one)
    assert metrics["rewards/letters/grad_norm"] == metrics["base_loss/grad_norm"]
    assert metrics["rewards/letters/cosines/regularizers/l2"] == metrics["cosines/base/l2"]
    assert "rewards/brief/grad_norm" not in metrics


def test_the_loss_and_its_training_are_those_without_the_split(tmp_path: Path) -> None:
    losses = []
    for tracked in ("true", "false"):
        folder = tmp_path / tracked
        folder.mkdir()
        config = small_rollouts(
            folder, f"train.track_grad_norms={tracked}", rewards=TWO, regularizers=[KL]
        )
        train(config, folder / "run")
        losses.append([line["loss_total"] for line in RunFolder(folder / "run").metrics()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_they_are_computed_where_gradients_are_compared(tmp_path: Path) -> None:
    config = small_rollouts(
        tmp_path, "train.track_every=2", "train.measure_progress=1", rewards=TWO
    )
    train(config, tmp_path / "run")
    lines = RunFolder(tmp_path / "run").metrics()
    assert ["rewards/brief/grad_norm" in line for line in lines] == [True, False, True]
    assert not [key for line in lines for key in line if "rewards" in key and "progress" in key]


def test_a_loss_of_the_users_own_is_not_split(tmp_path: Path) -> None:
    metrics = first_step(tmp_path, f"loss.use={__name__}:own_loss")
    assert "rewards/letters/grad_norm" not in metrics


def own_loss(data: Any, logprobs: Any) -> Any:
    return sum(row.sum() for row in logprobs)
