"""Tables of a config for on-policy training, and the rules that hold between them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from steelyard.experiment.config.reading import format_errors
from steelyard.experiment.config.schema import Config


def raw_config(**changes: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "rollouts": {"prompts": "prompts.jsonl"},
        "rewards": [{"use": "valid_json"}],
    }
    return raw | changes


def errors_of(raw: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(raw)
    return format_errors(caught.value)


def test_defaults_of_a_config_with_rollouts() -> None:
    config = Config.model_validate(raw_config())
    assert config.rollouts is not None
    assert (config.rollouts.per_step, config.rollouts.group_size) == (4, 8)
    assert (config.rollouts.advantage, config.rollouts.normalize) == ("grpo", True)
    assert config.loss.use == "importance_sampling"
    assert (config.tune.objective, config.tune.direction) == ("held_out/reward", "maximize")
    assert (config.source_key, config.source) == ("rollouts", config.rollouts)
    (reward,) = config.rewards
    assert (reward.weight, reward.run_in, reward.on_error) == (1.0, "auto", "drop")


def test_a_written_config_is_read_back() -> None:
    config = Config.model_validate(raw_config(train={"steps": 3}))
    written = json.dumps(config.model_dump(mode="json"))
    assert Config.model_validate_json(written, strict=False) == config
    assert "batch_size" not in json.loads(written)["train"]


def test_a_given_objective_and_loss_are_kept() -> None:
    raw = raw_config(tune={"objective": "rollouts/kl"}, loss={"use": "ppo"})
    config = Config.model_validate(raw)
    assert (config.tune.objective, config.tune.direction) == ("rollouts/kl", "minimize")
    assert config.loss.use == "ppo"


@pytest.mark.parametrize(
    ("objective", "direction"),
    [
        ("held_out/reward", "maximize"),
        ({"held_out/rewards/short": 1.0, "rewards/short/mean": 0.5}, "maximize"),
        ({"held_out/rewards/short": 1.0, "rollouts/kl": -0.5}, "minimize"),
    ],
)
def test_an_objective_of_rewards_is_maximized(objective: Any, direction: str) -> None:
    config = Config.model_validate(raw_config(tune={"objective": objective}))
    assert (config.tune.objective, config.tune.direction) == (objective, direction)
    given = raw_config(tune={"objective": objective, "direction": "minimize"})
    assert Config.model_validate(given).tune.direction == "minimize"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"batch_size": 4}},
            (
                "the config must have train.batch_size or [rollouts], not both: a step trains on "
                "rollouts.per_step × rollouts.group_size answers"
            ),
        ),
        (
            {"data": {"path": "train.jsonl"}},
            "the config must have either [data] or [rollouts] to train on, got both",
        ),
        (
            {"rollouts": None, "data": {"path": "train.jsonl"}},
            "the config must have [rollouts] for its [[rewards]], got [data]",
        ),
        (
            {"rewards": [{"use": "valid_json", "enabled": False}]},
            (
                "the config must have at least one enabled entry in [[rewards]] for [rollouts]: "
                "only prompts that are all tasks, 'reasoning_gym:TASK', have a scorer of their own"
            ),
        ),
        (
            {"loss": {"use": "cross_entropy"}},
            (
                "the config must have a loss over advantages for [rollouts], such as "
                "'importance_sampling', 'ppo' or 'cispo', got 'cross_entropy'"
            ),
        ),
        (
            {"rollouts": {"prompts": "p.jsonl", "temperature": 0.0}},
            (
                "[rollouts] must have temperature > 0 or group_size = 1: at temperature 0 all "
                "answers of a group are the same"
            ),
        ),
        (
            {"rollouts": {"prompts": "p.jsonl", "group_size": 1}},
            (
                "[rollouts] must have group_size >= 2 for advantage = 'grpo', which compares the "
                "answers to a prompt: raise it, or set advantage = 'none'"
            ),
        ),
        (
            {"rollouts": {"prompts": "p.jsonl", "substeps": 5}},
            (
                "[rollouts] must have substeps <= per_step, got 5 and 4: each substep trains on "
                "the answers to at least one prompt"
            ),
        ),
        (
            {"rollouts": {"prompts": "p.jsonl", "top_p": 0.0}},
            "[rollouts]: top_p must be > 0, got 0.0",
        ),
        (
            {"rewards": [{"use": "valid_json", "weight": {"at_most": 1.0}}]},
            (
                "[[rewards]] #1: weight must be a number >= 0, a schedule such as { warmup = [0.1, "
                "10] }, or { tune = [low, high] }; schedules: constant, cosine, exponential, "
                "linear, piecewise, warmup, got {'at_most': 1.0}"
            ),
        ),
        (
            {"rewards": [{"use": "valid_json", "on_error": "skip"}]},
            "[[rewards]] #1: on_error must be one of 'drop' or 'raise', got 'skip'",
        ),
    ],
)
def test_rules_between_the_tables(changes: dict[str, Any], message: str) -> None:
    assert errors_of(raw_config(**changes)) == message


def test_one_answer_has_a_signal_without_a_comparison() -> None:
    table = {"prompts": "p.jsonl", "group_size": 1, "advantage": "none", "temperature": 0.0}
    config = Config.model_validate(raw_config(rollouts=table))
    assert config.rollouts is not None
    assert config.rollouts.group_size == 1
