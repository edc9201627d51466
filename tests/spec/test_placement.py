from __future__ import annotations

from typing import Any

import pytest

from steelyard.errors import SpecError
from steelyard.spec import check_placement

AMOUNT = "{} must be a number >= 0, and a whole one above 1, got {} (reward 'judge')."


@pytest.mark.parametrize(
    "placement",
    [
        {},
        {"num_cpus": 0, "num_gpus": 0.25},
        {"num_cpus": 8.0, "resources": {"judge": 2, "rack": 0.001}},
        {"runtime_env": {"pip": ["httpx"]}},
    ],
)
def test_what_ray_takes_is_accepted(placement: dict[str, Any]) -> None:
    check_placement(placement, "reward 'judge'")


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"num_cpus": "2"}, AMOUNT.format("num_cpus", "'2'")),
        ({"num_cpus": True}, AMOUNT.format("num_cpus", "True")),
        ({"num_gpus": 1.5}, AMOUNT.format("num_gpus", "1.5")),
        ({"num_gpus": float("nan")}, AMOUNT.format("num_gpus", "nan")),
        ({"resources": {"judge": -1}}, AMOUNT.format("resources['judge']", "-1")),
        (
            {"resources": ["judge"]},
            "resources must be a mapping of names to amounts, got ['judge'] (reward 'judge').",
        ),
        (
            {"resources": {1: 1}},
            "resources must be a mapping of names to amounts, got {1: 1} (reward 'judge').",
        ),
        (
            {"resources": {"GPU": 1}},
            (
                "resources must not name 'GPU', which has an option of its own: use num_gpus=1 "
                "(reward 'judge')."
            ),
        ),
        (
            {"runtime_env": "key=secret"},
            "runtime_env must be a mapping, got an object of type str (reward 'judge').",
        ),
    ],
)
def test_a_broken_rule_names_reward_rule_and_value(placement: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_placement(placement, "reward 'judge'")
    assert str(caught.value) == message
