"""On-policy runs with the tiny model: rewards rise, runs resume to the bit, and what may fail."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import RunError, TermError
from steelyard.experiment import RunFolder, resume, train
from tests.engine.server.wire_client import start
from tests.experiment.small_runs import (
    KL,
    Recorder,
    brief,
    letters,
    reward,
    small_rollouts,
    without_clock,
)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(line) for line in RunFolder(folder).metrics()]


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


class Counted:
    """Stops a run after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps + 1

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def fails_on_some(record: Mapping[str, Any], answer: str) -> float:
    if len(answer) % 2:
        raise RuntimeError("the judge is down")
    return float(len(answer))


def always_fails(record: Mapping[str, Any], answer: str) -> float:
    raise ConnectionError("refused")


def equal(record: Mapping[str, Any], answer: str) -> float:
    return 0.1


def returns_text(record: Mapping[str, Any], answer: str) -> Any:
    return "good"


def own(function: Any, **keys: Any) -> dict[str, Any]:
    return {"use": f"{__name__}:{function.__name__}", **keys}


def test_a_run_writes_metrics_and_answers(tmp_path: Path) -> None:
    config = small_rollouts(
        tmp_path, rewards=[reward(letters), reward(brief, weight=0.5)], regularizers=[KL]
    )
    train(config, tmp_path / "run")
    lines = lines_of(tmp_path / "run")
    assert len(lines) == 3
    for line in lines:
        expected = line["rewards/letters/mean"] + 0.5 * line["rewards/brief/mean"]
        assert line["rollouts/reward"] == pytest.approx(expected)
        assert line["ratio"] == pytest.approx(1.0, abs=1e-3)
        assert 0 <= line["rollouts/no_signal"] <= 1
    assert lines[0]["rollouts/kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines[0]["regularizers/kl/value"] == pytest.approx(0.0, abs=1e-6)
    assert lines[-1]["regularizers/kl/value"] > 1e-6
    assert {"held_out/reward", "held_out/rewards/letters", "held_out/regularizers/kl"} <= set(
        lines[-1]
    )

    answers = [record for record in rollouts_of(tmp_path / "run") if "held_out" not in record]
    assert [record["step"] for record in answers] == [0] * 8 + [1] * 8 + [2] * 8
    for record in answers:
        assert record["rewards"]["letters"] == letters({}, record["answer"])
        total = record["rewards"]["letters"] + 0.5 * record["rewards"]["brief"]
        assert record["reward"] == pytest.approx(total)
    first = [record for record in answers if record["step"] == 0 and record["group"] == 0]
    assert sum(record["advantage"] for record in first) == pytest.approx(0.0, abs=1e-9)
    assert {record["prompt"] for record in first} == {first[0]["prompt"]}


def test_the_reward_rises(tmp_path: Path) -> None:
    config = small_rollouts(
        tmp_path, "train.steps=30", "rollouts.group_size=8", "train.save_every=0",
        "train.learning_rate=0.02",
    )  # fmt: skip
    train(config, tmp_path / "run")
    means = [line["rewards/letters/mean"] for line in lines_of(tmp_path / "run")]
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.5


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path: Path, loss: str) -> None:
    settings = (f"loss.use={loss}", "rollouts.substeps=2", "train.save_every=2")
    config = small_rollouts(tmp_path, *settings, regularizers=[KL])
    train(config, tmp_path / "whole")
    train(config, tmp_path / "stopped", stop=Counted(1))
    assert len(lines_of(tmp_path / "stopped")) == 1
    resume(tmp_path / "stopped")
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "whole")
    assert rollouts_of(tmp_path / "stopped") == rollouts_of(tmp_path / "whole")


def test_substeps_use_all_answers_and_clip(tmp_path: Path) -> None:
    config = small_rollouts(
        tmp_path, "rollouts.substeps=2", "loss.use=ppo", "train.learning_rate=0.3", "train.steps=2"
    )
    train(config, tmp_path / "run")
    last = lines_of(tmp_path / "run")[-1]
    # The second half was sampled before the update on the first.
    assert last["clip_fraction"] > 0
    assert last["ratio"] != pytest.approx(1.0, abs=1e-3)


def test_a_failed_reward_drops_the_answer_and_not_the_step(tmp_path: Path) -> None:
    recorder = Recorder()
    config = small_rollouts(tmp_path, "train.steps=2", rewards=[own(fails_on_some)])
    train(config, tmp_path / "run", watch=recorder)
    line = lines_of(tmp_path / "run")[0]
    answers = [r for r in rollouts_of(tmp_path / "run") if not r["step"] and "held_out" not in r]
    dropped = [record for record in answers if len(record["answer"]) % 2]
    assert dropped
    assert line["rollouts/dropped"] == line["rewards/fails_on_some/failed"] == len(dropped)
    for record in dropped:
        assert (record["reward"], record["advantage"]) == (None, None)
        assert "the judge is down" in record["failed"]["fails_on_some"]
    count = f"{len(dropped)} answer{'s' * (len(dropped) > 1)}"
    failure = f"failed for {count}: RuntimeError: the judge is down"
    assert f"step 0: reward 'fails_on_some' {failure}" in recorder.messages


def test_a_step_without_any_reward_is_an_error(tmp_path: Path) -> None:
    config = small_rollouts(tmp_path, "rollouts.held_out=0", rewards=[own(always_fails)])
    with pytest.raises(RunError, match=r"step 0 must have 2 answers with rewards, and none has"):
        train(config, tmp_path / "run")
    assert len(rollouts_of(tmp_path / "run")) == 8, "the message points to them"


def test_a_reward_may_fail_the_run(tmp_path: Path) -> None:
    rewards = [own(returns_text, name="judge", on_error="raise")]
    with pytest.raises(TermError, match=r"reward 'judge' must return a finite number.* 'good'"):
        train(small_rollouts(tmp_path, rewards=rewards), tmp_path / "run")


def test_equal_rewards_are_counted_and_train_nothing(tmp_path: Path) -> None:
    config = small_rollouts(tmp_path, "train.steps=1", rewards=[own(equal)])
    train(config, tmp_path / "run")
    (line,) = lines_of(tmp_path / "run")
    assert line["rollouts/no_signal"] == 1.0
    assert line["base_loss/value"] == 0.0
    assert line["base_loss/grad_norm"] == 0.0


def test_a_disabled_reward_is_measured_and_not_trained_on(tmp_path: Path) -> None:
    rewards = [own(equal), reward(letters, enabled=False)]
    train(small_rollouts(tmp_path, "train.steps=1", rewards=rewards), tmp_path / "run")
    (line,) = lines_of(tmp_path / "run")
    assert line["rewards/letters/weight"] == 0.0
    assert line["rewards/letters/mean"] > 0
    assert line["rollouts/no_signal"] == 1.0


def test_a_weight_may_be_a_schedule(tmp_path: Path) -> None:
    rewards = [reward(letters), reward(brief, weight={"linear": [1.0, 0.0, 2]})]
    train(small_rollouts(tmp_path, rewards=rewards), tmp_path / "run")
    weights = [line["rewards/brief/weight"] for line in lines_of(tmp_path / "run")]
    assert weights == [1.0, 0.5, 0.0]


def test_a_sampled_evaluation_has_groups(tmp_path: Path) -> None:
    config = small_rollouts(tmp_path, "rollouts.evaluate=sampled", "train.steps=1")
    train(config, tmp_path / "run")
    held_out = [record for record in rollouts_of(tmp_path / "run") if record.get("held_out")]
    assert len(held_out) == 4
    assert {record["line"] for record in held_out}.isdisjoint(
        record["line"] for record in rollouts_of(tmp_path / "run") if "held_out" not in record
    )


def test_changed_prompts_are_noticed(tmp_path: Path) -> None:
    config = small_rollouts(tmp_path)
    train(config, tmp_path / "run", stop=Counted(1))
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "new"}\n')
    with pytest.raises(RunError, match="must be as it was when the run began"):
        resume(tmp_path / "run")


def slow(record: Mapping[str, Any], answer: str) -> float:
    time.sleep(300)
    return 1.0


def test_a_slow_reward_in_a_process_is_ended(tmp_path: Path) -> None:
    rewards = [reward(letters), own(slow, run_in="process", timeout=0.2, enabled=False)]
    config = small_rollouts(
        tmp_path, "train.steps=1", "rollouts.held_out=0", "rollouts.group_size=2",
        "rollouts.per_step=1", rewards=rewards,
    )  # fmt: skip
    train(config, tmp_path / "run")
    (line,) = lines_of(tmp_path / "run")
    assert line["rewards/slow/failed"] == 2.0
    assert line["rollouts/dropped"] == 0.0


def test_a_run_on_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real SDK over loopback: the same files, and no record leaves this machine."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    with start(tmp_path / "served") as running:
        service = ("model.backend=tinker", f"model.base_url={running.base_url}")
        config = small_rollouts(tmp_path, *service, "train.steps=2", regularizers=[KL])
        train(config, tmp_path / "remote")
    lines = lines_of(tmp_path / "remote")
    assert len(lines) == 2
    assert lines[0]["rollouts/kl"] == pytest.approx(0.0, abs=1e-5)
    assert lines[0]["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert len(rollouts_of(tmp_path / "remote")) == 2 * 8 + 2  # and a held-out one, twice
    # The same answers as in this process, up to rounding of the log-probs.
    train(small_rollouts(tmp_path, "train.steps=2", regularizers=[KL]), tmp_path / "local")
    first = [record["answer"] for record in rollouts_of(tmp_path / "remote")[:9]]
    assert first == [record["answer"] for record in rollouts_of(tmp_path / "local")[:9]]


def huge(record: Mapping[str, Any], answer: str) -> float:
    return 1e308 if len(answer) % 2 else -1e308


def large(record: Mapping[str, Any], answer: str) -> float:
    return 1e38 if len(answer) % 2 else -1e38


def test_huge_rewards_are_named_and_dropped(tmp_path: Path) -> None:
    rewards = [own(huge, on_error="raise")]
    with pytest.raises(TermError, match=r"reward 'huge' must return a number between -3\.4e38"):
        train(small_rollouts(tmp_path, rewards=rewards), tmp_path / "raised")
    with pytest.raises(RunError, match=r"must have 2 answers with rewards, and none has"):
        train(small_rollouts(tmp_path, rewards=[own(huge)]), tmp_path / "dropped")
    assert "reward 'huge' failed for" in (tmp_path / "dropped" / "log.txt").read_text()


def test_huge_weights_of_rewards_are_named(tmp_path: Path) -> None:
    rewards = [own(large, weight=1e300)]
    with pytest.raises(RunError, match=r"reward 'large' times its weight must be a number of at"):
        train(small_rollouts(tmp_path, rewards=rewards), tmp_path / "run")
    train(small_rollouts(tmp_path, rewards=[own(large)]), tmp_path / "fine")
