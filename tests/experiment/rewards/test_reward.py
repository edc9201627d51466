"""Rewards built from a config, and the rules for one."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import steelyard
from steelyard.errors import ConfigError, MissingExtraError, SpecError
from steelyard.experiment import read_config
from steelyard.experiment.rewards.reward import REWARDS, Reward, build_rewards
from steelyard.experiment.rewards.scoring import score
from steelyard.spec.registry import lookup

from . import functions


@pytest.fixture
def module(folder: Path) -> Path:
    """A folder with a module of rewards, `own_rewards_of_mine`."""
    (folder / "own_rewards_of_mine.py").write_text(Path(functions.__file__).read_text("utf-8"))
    return folder


def build(folder: Path, *entries: dict[str, Any], **tables: Any) -> tuple[Reward, ...]:
    raw = {"rollouts": {"prompts": "train.jsonl"}, "rewards": list(entries), **tables}
    return build_rewards(read_config(raw, folder=folder))


def test_a_function_gets_its_options_with_each_call(module: Path) -> None:
    entry = {"use": "own_rewards_of_mine:words", "options": {"scale": 2.0}}
    (reward,) = build(module, entry)
    assert (reward.name, reward.weight, reward.executor) == ("words", 1.0, "thread")
    assert score([reward], [({}, "two words")], timeout=30.0)["words"][0].value == 4.0


def test_a_class_is_built_with_its_options(module: Path) -> None:
    entry = {"use": "own_rewards_of_mine:Scaled", "options": {"by": 3.0}}
    (reward,) = build(module, entry)
    assert (reward.name, reward.options, reward.fn({}, "ab")) == ("scaled", {}, 6.0)


def test_on_ray_tasks_have_resources(module: Path) -> None:
    entries = [
        {
            "use": f"own_rewards_of_mine:{use}",
            "run_in": "ray",
            "options": options,
            "resources": {"num_gpus": 0.5, "judge": 1},
        }
        for use, options in (("words", {"scale": 2.0}), ("Scaled", {"by": 3.0}))
    ]
    words, scaled = build(module, *entries)
    assert words.resources == scaled.resources == {"num_gpus": 0.5, "judge": 1}
    assert (words.options, scaled.options) == ({"scale": 2.0}, {})
    with pytest.raises(ConfigError, match=r"num_gpus must be a number >= 0, .*\(reward 'words'\)"):
        build(module, {**entries[0], "resources": {"num_gpus": "one"}})


def test_a_registered_name_is_found(module: Path) -> None:
    steelyard.register("reward_of_a_test")(functions.awords)
    (reward,) = build(module, {"use": "reward_of_a_test"})
    assert (reward.name, reward.fn, reward.executor) == (
        "reward_of_a_test",
        functions.awords,
        "async",
    )


def test_a_reward_has_the_settings_of_its_entry(module: Path) -> None:
    entry = {
        "use": "own_rewards_of_mine:words",
        "name": "w",
        "weight": {"linear": [1.0, 0.0, 4]},
        "run_in": "process",
        "timeout": 5.0,
        "on_error": "raise",
    }
    first, second = build(
        module, entry, {"use": "own_rewards_of_mine:words", "weight": 2, "enabled": False}
    )
    assert (first.name, first.executor, first.timeout, first.on_error) == (
        "w",
        "process",
        5.0,
        "raise",
    )
    assert [first.weight_at(step) for step in (0, 1, 4)] == [1.0, 0.75, 0.0]
    assert (second.weight, second.weight_at(0)) == (2.0, 0.0)


def test_a_reward_may_say_where_it_runs() -> None:
    class Solver:
        run_in = "process"

        def __call__(self, record: Any, answer: str) -> float:
            return 0.0

    assert Reward("r", Solver()).executor == "process"
    assert Reward("r", Solver(), run_in="thread").executor == "thread"


def test_a_cheap_reward_with_a_timeout_runs_in_a_thread() -> None:
    class Cheap:
        run_in = "inline"

        def __call__(self, record: Any, answer: str) -> float:
            return 0.0

    assert Reward("r", Cheap()).executor == "inline"
    assert Reward("r", Cheap(), timeout=1.0).executor == "thread"


def test_secrets_of_options_are_resolved(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_A_JUDGE", "3")
    entry = {"use": "own_rewards_of_mine:Scaled", "options": {"by": {"env": "KEY_OF_A_JUDGE"}}}
    (reward,) = build(module, entry)
    assert reward.fn.by == "3"  # type: ignore[attr-defined]  # of a Scaled
    monkeypatch.delenv("KEY_OF_A_JUDGE")
    with pytest.raises(ConfigError, match=r"^\[\[rewards\]\] #1: options.by must be in the env"):
        build(module, entry)


def test_every_ready_made_name_can_be_imported() -> None:
    for name, path in REWARDS.items():
        assert lookup(path).name == name


READY_MADE = ", ".join(REWARDS)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"use": "exact_macth"},
            (
                f"use must be a ready-made reward ({READY_MADE}), a registered name or "
                f"'package.module:attr', got 'exact_macth'; did you mean 'exact_match'?"
            ),
        ),
        (
            {"use": "qqqq"},
            (
                f"use must be a ready-made reward ({READY_MADE}), a registered name or "
                f"'package.module:attr', got 'qqqq'."
            ),
        ),
        (
            {"use": "kl_to_reference"},
            (
                f"use must be a ready-made reward ({READY_MADE}), a registered name or "
                f"'package.module:attr', got 'kl_to_reference', which is a regularizer: put it in "
                f"[[regularizers]]."
            ),
        ),
        (
            {"use": "own_rewards_of_mine:missing"},
            (
                "use: 'own_rewards_of_mine:missing' cannot be imported: module "
                "'own_rewards_of_mine' has no attribute 'missing'."
            ),
        ),
        (
            {"use": "math:pi"},
            (
                "a reward must be a function (record, answer) -> float, got 3.141592653589793 "
                "(reward 'pi')."
            ),
        ),
        (
            {"use": "own_rewards_of_mine:words", "options": {"scaale": 2}},
            (
                "a reward must accept (record, answer) and the options ['scaale']: got an "
                "unexpected keyword argument 'scaale'; its options are 'scale' (reward 'words')."
            ),
        ),
        (
            {"use": "own_rewards_of_mine:Scaled", "options": {"buy": 2}},
            (
                "use: 'own_rewards_of_mine:Scaled' cannot be made with the options ['buy']: got an "
                "unexpected keyword argument 'buy'; its options are 'by'."
            ),
        ),
        (
            {"use": "os:getcwd"},
            (
                "a reward must accept (record, answer) and the options []: too many positional "
                "arguments; its options are none (reward 'getcwd')."
            ),
        ),
        (
            {"use": "own_rewards_of_mine:words", "weight": {"tune": [0.1, 1.0]}},
            "weight must be a number or a schedule to train with, got a range",
        ),
        (
            {"use": "own_rewards_of_mine:words", "weight": {"linear": [1.0, -1.0, 4]}},
            "weight must be a finite number >= 0, got -0.5 at step 3 (reward 'words').",
        ),
        (
            {"use": "own_rewards_of_mine:words", "run_in": "async"},
            "run_in='async' needs an async fn",
        ),
        (
            {"use": "own_rewards_of_mine:awords", "run_in": "inline"},
            "run_in='inline' cannot run an async fn: use 'auto' or 'async' (reward 'awords').",
        ),
        (
            {"use": "own_rewards_of_mine:words", "run_in": "inline", "timeout": 1.0},
            "timeout cannot go with run_in='inline'",
        ),
    ],
)
def test_an_invalid_entry_is_an_error_with_its_location(
    module: Path, entry: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(module, {"use": "own_rewards_of_mine:Scaled"}, entry)
    assert str(caught.value).startswith(f"[[rewards]] #2: {message}")


def test_names_are_unique(module: Path) -> None:
    entry = {"use": "own_rewards_of_mine:words"}
    with pytest.raises(
        ConfigError, match=r"^\[\[rewards\]\] #2: name must be unique, and 'words' stands twice"
    ):
        build(module, entry, entry)
    assert [each.name for each in build(module, entry, entry | {"name": "more"})] == [
        "words",
        "more",
    ]


def test_a_missing_module_is_an_error(module: Path) -> None:
    with pytest.raises(ConfigError, match="imports must be modules, and 'no_such' is none"):
        build(module, {"use": "own_rewards_of_mine:words"}, imports=["no_such"])


def test_a_reward_that_does_not_pickle_is_found_before_the_first_step(folder: Path) -> None:
    (folder / "locked_rewards_of_mine.py").write_text(
        "import threading\n"
        "class Locked:\n"
        "    def __init__(self):\n"
        "        self.lock = threading.Lock()\n"
        "    def __call__(self, record, answer):\n"
        "        return 1.0\n"
    )
    entry = {"use": "locked_rewards_of_mine:Locked", "run_in": "process"}
    with pytest.raises(ConfigError) as caught:
        build(folder, entry)
    assert str(caught.value) == (
        "[[rewards]] #1: run_in must be a place where the reward can run, and 'process' is none: "
        "TypeError: cannot pickle '_thread.lock' object (reward 'Locked'): leave out what cannot "
        "be pickled, or use run_in = 'thread'."
    )
    assert build(folder, entry | {"run_in": "thread"})[0].executor == "thread"


def test_a_class_is_no_reward() -> None:
    with pytest.raises(SpecError, match=r"must accept \(record, answer\)"):
        Reward("r", threading.Event)


@pytest.mark.parametrize(
    ("module", "use", "options", "extra"),
    [
        ("z3", "logic", {"constraints": "operator:eq"}, "logic"),
        ("httpx", "http_validation", {"url": "http://host"}, "http"),
        ("transformers", "reward_model", {"model": "m"}, "engine"),
    ],
)
def test_a_missing_extra_names_the_pip_command(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    use: str,
    options: dict[str, Any],
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError) as caught:
        build(folder, {"use": use, "options": options})
    assert str(caught.value) == (
        f'reward {use!r} needs {module}, which is not installed: pip install "steelyard[{extra}]".'
    )
