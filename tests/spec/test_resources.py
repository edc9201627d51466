from __future__ import annotations

from typing import Any

import pytest

from steelyard.errors import SpecError
from steelyard.spec.regularizer import check_resources

AMOUNT = "{} must be a number >= 0, and a whole one above 1, got {} (reward 'judge')."


@pytest.mark.parametrize(
    "resources",
    [
        {},
        {"num_cpus": 0, "num_gpus": 0.25},
        {"num_cpus": 8.0, "judge": 2, "rack": 0.001},
        {"runtime_env": {"pip": ["httpx"]}},
    ],
)
def test_what_ray_takes_is_accepted(resources: dict[str, Any]) -> None:
    check_resources(resources, "ray", "reward 'judge'")


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"num_cpus": "2"}, AMOUNT.format("num_cpus", "'2'")),
        ({"num_cpus": True}, AMOUNT.format("num_cpus", "True")),
        ({"num_gpus": 1.5}, AMOUNT.format("num_gpus", "1.5")),
        ({"num_gpus": float("nan")}, AMOUNT.format("num_gpus", "nan")),
        ({"judge": -1}, AMOUNT.format("judge", "-1")),
        (
            ["judge"],
            "resources must be a mapping of names to amounts, got ['judge'] (reward 'judge').",
        ),
        (
            {1: 1},
            "resources must be a mapping of names to amounts, got {1: 1} (reward 'judge').",
        ),
        (
            {"GPU": 1},
            (
                "resources must not name 'GPU', which has a key of its own: use num_gpus=1 "
                "(reward 'judge')."
            ),
        ),
        (
            {"runtime_env": "key=secret"},
            "runtime_env must be a mapping, got an object of type str (reward 'judge').",
        ),
    ],
)
def test_a_broken_rule_names_reward_rule_and_value(resources: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_resources(resources, "ray", "reward 'judge'")
    assert str(caught.value) == message


@pytest.mark.parametrize("run_in", ["auto", "process"])
def test_resources_without_ray_are_an_error(run_in: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_resources({"num_gpus": 1}, run_in, "reward 'judge'")
    assert str(caught.value) == (
        f"resources are those of a task on Ray, got ['num_gpus'] with run_in='{run_in}': set "
        f"run_in='ray', or leave them out (reward 'judge')."
    )
    check_resources({}, run_in, "reward 'judge'")
