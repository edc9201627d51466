"""Change and pause a run while it goes on, and repeat the changes when it is resumed."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from steelyard.errors import ConfigError, RunError
from steelyard.experiment import RunFolder, continue_run, pause_run, request_settings, resume, train
from steelyard.experiment.config.schema import Config
from steelyard.experiment.run import folder
from steelyard.experiment.run.changes import describe_settings
from tests.experiment.small_runs import (
    DRIFT,
    KL,
    L2,
    Recorder,
    brief,
    letters,
    noise,
    reward,
    small_config,
    small_rollouts,
    stop_after,
    term,
    without_clock,
)

TERMS = [L2, KL, DRIFT, term(noise)]


class Steering(Recorder):
    """A watcher that does something after some steps, in the middle of the run."""

    def __init__(self, folder: Path, actions: Mapping[int, Callable[[Path], object]]) -> None:
        super().__init__()
        self.folder, self.actions = folder, actions

    def step(self, step: int, steps: int, metrics: dict[str, Any]) -> None:
        super().step(step, steps, metrics)
        if step in self.actions:
            self.actions[step](self.folder)


def ask(*settings: str) -> Callable[[Path], object]:
    return lambda folder: request_settings(folder, settings)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(line) for line in RunFolder(folder).metrics()]


def weights(folder: Path, name: str) -> list[float]:
    return [line[f"regularizers/{name}/weight"] for line in RunFolder(folder).metrics()]


def test_a_change_holds_from_the_next_step_on(folder: Path) -> None:
    actions = {
        1: ask("l2.weight=0.5", "learning_rate=1e-3"),
        2: ask("drift.enabled=false", "kl.at_most=0.02"),
    }
    steering = Steering(folder / "r", actions)
    train(small_config(folder, "train.steps=5", regularizers=TERMS), folder / "r", watch=steering)
    lines = RunFolder(folder / "r").metrics()
    assert weights(folder / "r", "l2") == [0.1, 0.1, 0.5, 0.5, 0.5]
    assert [line["optim/learning_rate"] for line in lines] == [1e-2, 1e-2, 1e-3, 1e-3, 1e-3]
    assert ["regularizers/drift/value" in line for line in lines] == [True] * 3 + [False] * 2
    assert [line.get("regularizers/kl/bound") for line in lines] == [None] * 3 + [0.02] * 2
    assert "step 2: l2.weight = 0.5, learning_rate = 0.001 from now on" in steering.messages
    assert [(c["step"], c["set"]) for c in RunFolder(folder / "r").changes()] == [
        (2, [{"l2.weight": 0.5, "learning_rate": 1e-3}]),
        (3, [{"drift.enabled": False, "kl.at_most": 0.02}]),
    ]


@pytest.mark.parametrize("checkpoint", [0, 2, 4])
def test_a_resumed_run_repeats_the_changes_at_their_steps(folder: Path, checkpoint: int) -> None:
    """Also from an earlier checkpoint than the last one, and from the beginning."""
    actions = {
        0: ask("l2.weight=0.5"),
        2: ask("kl.at_most=0.001"),
        3: ask("kl.weight={ warmup = [0.4, 10] }", "noise.enabled=false"),
        4: ask("kl.at_most=0.002", "learning_rate={ linear = [1e-2, 0, 8] }"),
    }
    config = small_config(
        folder, "train.steps=7", "train.save_every=2", "train.keep=9", regularizers=TERMS
    )
    whole = folder / "whole"
    train(config, whole, watch=Steering(whole, actions))
    again = folder / "again"
    shutil.copytree(whole, again, symlinks=True)
    (again / "result.json").unlink()
    for record in (again / "checkpoints").glob("step-*.json"):
        if int(record.stem.removeprefix("step-")) > checkpoint:
            record.unlink()
    recorder = Recorder()
    resume(again, watch=recorder)
    assert [line["step"] for line in recorder.steps] == list(range(checkpoint, 7))
    assert metrics(again) == metrics(whole)
    assert len(set(weights(whole, "kl"))) > 3


def test_weights_and_switches_of_rewards_hold_from_the_next_step_on(folder: Path) -> None:
    """The weighted sum that answers are compared by has them, in a resumed run too."""
    actions = {
        0: ask("rewards.letters.weight=3", "rewards.brief.enabled=false"),
        2: ask("rewards.letters.weight={ warmup = [2.0, 4] }", "rewards.brief.enabled=true"),
    }
    entries = [reward(letters, name="letters"), reward(brief)]
    config = small_rollouts(folder, "train.steps=4", "train.keep=9", rewards=entries)
    run = folder / "r"
    train(config, run, watch=Steering(run, actions))
    lines = RunFolder(run).metrics()
    assert [line["rewards/letters/weight"] for line in lines] == [1.0, 3.0, 3.0, 1.5]
    assert [line["rewards/brief/weight"] for line in lines] == [1.0, 0.0, 0.0, 1.0]
    for record in RunFolder(run).rollouts():
        used = lines[record["step"]]
        # Held-out answers of step 0 are those before training, with the weights of that step.
        weighted = [used[f"rewards/{n}/weight"] * v for n, v in record["rewards"].items()]
        assert record["reward"] == pytest.approx(sum(weighted))
    again = folder / "again"
    shutil.copytree(run, again, symlinks=True)
    for path in (*(again / "checkpoints").glob("step-*[234].json"), again / "result.json"):
        path.unlink()
    resume(again)
    assert metrics(again) == metrics(run)


def test_settings_of_rewards_are_described_and_checked(folder: Path) -> None:
    entries = [reward(letters, name="l2"), reward(brief, weight={"linear": [0, 1, 3]})]
    config = small_rollouts(folder, rewards=entries, regularizers=[L2])
    train(config, folder / "r", stop=lambda: True)
    assert describe_settings(folder / "r") == {
        "learning_rate": 0.01,
        "l2.weight": 0.1,
        "l2.enabled": True,
        "rewards.l2.weight": 1.0,
        "rewards.l2.enabled": True,
        "rewards.brief.weight": {"linear": [0, 1, 3]},
        "rewards.brief.enabled": True,
    }
    request_settings(folder / "r", ["l2.weight=5", "rewards.l2.weight=7"])
    found = describe_settings(folder / "r")
    assert (found["l2.weight"], found["rewards.l2.weight"]) == (5, 7)
    refused = {
        "brief.weight=1": "got 'brief.weight'; did you mean rewards.brief.weight?",
        "rewards.brief.at_most=1": (
            "or that of a reward (l2, brief): rewards.<reward>.weight or rewards.<reward>.enabled, "
            "got 'rewards.brief.at_most'"
        ),
        "rewards.l2.weight=-1": "[[rewards]] #1: weight must be >= 0, got -1",
        "rewards.l2.weight={ tune = [0, 1] }": "must be one value, not a range to tune",
    }
    for setting, message in refused.items():
        with pytest.raises(ConfigError) as caught:
            request_settings(folder / "r", [setting])
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="must have at least one enabled entry in"):
        request_settings(folder / "r", ["rewards.l2.enabled=false", "rewards.brief.enabled=false"])


def test_a_change_of_a_stopped_run_holds_when_it_is_resumed(folder: Path) -> None:
    config = small_config(folder, "train.steps=4")
    train(config, folder / "r", stop=stop_after(2))
    taken, is_running = request_settings(folder / "r", ["l2.weight=0.7"])
    assert (taken, is_running) == ({"l2.weight": 0.7}, False)
    resume(folder / "r")
    assert weights(folder / "r", "l2") == [0.1, 0.1, 0.7, 0.7]


def test_changes_of_several_commands_are_all_taken(folder: Path) -> None:
    def many(run: Path) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda n: request_settings(run, {"l2.weight": n / 10}), range(16)))
        request_settings(run, {"l2.weight": 2.0})

    train(small_config(folder), folder / "r", watch=Steering(folder / "r", {0: many}))
    (change,) = RunFolder(folder / "r").changes()
    values = [settings["l2.weight"] for settings in change["set"]]
    assert sorted(values[:-1]) == [n / 10 for n in range(16)]
    assert weights(folder / "r", "l2") == [0.1, 2.0, 2.0]


def test_damaged_and_invalid_requests_change_nothing(folder: Path) -> None:
    def damage(run: Path) -> None:
        lines = ['{"set": 3}', "nonsense", '{"set": {"l2.weight": -1}}', '{"set": {"l2.wei']
        (run / "requests.jsonl").write_text("\n".join(lines))

    def complete(run: Path) -> None:
        with (run / "requests.jsonl").open("a") as file:
            file.write('ght": 0.3}}\n')

    steering = Steering(folder / "r", {0: damage, 1: complete})
    train(small_config(folder, "train.steps=4"), folder / "r", watch=steering)
    assert weights(folder / "r", "l2") == [0.1, 0.1, 0.3, 0.3]
    refused = "step 1: l2.weight = -1 was refused: [[regularizers]] #1: weight must be >= 0, got -1"
    assert refused in steering.messages


def test_a_run_waits_while_it_is_paused(folder: Path) -> None:
    run, looks = folder / "r", []

    def stop() -> bool:
        if (run / "paused").exists():
            looks.append(len(RunFolder(run).metrics()))
            if len(looks) == 3:
                continue_run(run)
        return False

    steering = Steering(run, {0: pause_run})
    outcome = train(small_config(folder), run, watch=steering, stop=stop)
    assert (outcome.status, outcome.steps) == ("done", 3)
    assert looks == [1, 1, 1]  # no step was made
    assert f"paused after 1 steps: go on with 'steelyard continue {run}'" in steering.messages
    assert "going on" in steering.messages


def test_a_paused_run_can_be_stopped_and_resumed(folder: Path) -> None:
    run = folder / "r"
    config = small_config(folder, "train.save_every=0")
    steering = Steering(run, {0: pause_run})
    outcome = train(config, run, watch=steering, stop=(run / "paused").exists)
    assert (outcome.status, outcome.steps) == ("interrupted", 1)
    assert resume(run).steps == 3
    train(config, folder / "whole")
    assert metrics(run) == metrics(folder / "whole")


@pytest.fixture
def stopped(folder: Path) -> Path:
    """A run of a config with three terms, in which no step was made."""
    run = RunFolder(folder / "stopped")
    nameless = {"use": "l1", "weight": {"at_most": 0.0, "scale": 2.0}}
    with run.locked():
        run.begin(small_config(folder, regularizers=[L2, {**KL, "name": "a.b"}, nameless]))
    return run.path


def test_the_settings_of_a_run(stopped: Path) -> None:
    request_settings(stopped, ["a.b.weight=0.25", "regularizers.l1.at_most=0", "l2.enabled=false"])
    assert describe_settings(stopped) == {
        "learning_rate": 0.01,
        "l2.weight": 0.1,
        "l2.enabled": False,
        "a.b.weight": 0.25,
        "a.b.enabled": True,
        "l1.at_most": 0,
        "l1.enabled": True,
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("l2.wieght=1", "got 'l2.wieght'; did you mean l2.weight?"),
        ("l3.weight=1", "got 'l3.weight'; did you mean l2.weight?"),
        ("steps=9", "a setting must be learning_rate, or that of a term (l2, a.b, l1): "),
        ("l2.weight=-1", "[[regularizers]] #1: weight must be >= 0, got -1"),
        ("l2.weight=nan", "[[regularizers]] #1: weight must be a number >= 0, a schedule"),
        ("l2.weight=much", "[[regularizers]] #1: weight must be a number >= 0, a schedule"),
        ("l2.weight={ tune = [0, 1] }", "l2.weight must be one value, not a range to tune"),
        ("l2.at_most=0", "[[regularizers]] #1: weight must be { at_most = b }"),
        ("l2.enabled=1", "[[regularizers]] #1: enabled must be true or false, got 1"),
        ("learning_rate=-1", "[train]: learning_rate must be >= 0, got -1"),
        ("l2.weight", "a setting must look like kl.weight=0.2, got 'l2.weight'."),
        ("=1", "a setting must look like kl.weight=0.2, got '=1'."),
    ],
)
def test_what_cannot_be_set_is_refused(stopped: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        request_settings(stopped, [setting])
    assert message in str(caught.value)
    assert not (stopped / "requests.jsonl").exists()


COMMANDS: list[Callable[[Path], object]] = [ask("l2.weight=1"), pause_run, continue_run]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_run_and_a_finished_run_are_refused(
    folder: Path, command: Callable[[Path], object]
) -> None:
    with pytest.raises(RunError, match="must be the folder of a run, with a"):
        command(folder / "nowhere")
    train(small_config(folder), folder / "r")
    with pytest.raises(RunError, match="must be a run that has not ended, and it is done"):
        command(folder / "r")


def test_a_run_that_no_process_trains_cannot_be_paused(stopped: Path) -> None:
    with pytest.raises(RunError) as caught:
        pause_run(stopped)
    assert str(caught.value) == (
        f"{stopped} must be a run that is going on, and no process trains it: go on with "
        f"'steelyard resume {stopped}'."
    )
    assert continue_run(stopped) is False


def test_where_locks_cannot_be_seen_a_run_may_be_going_on(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_LOCKS", stopped / "none")
    assert request_settings(stopped, ["l2.weight=1"])[1] is True
    pause_run(stopped)
    assert continue_run(stopped) is True


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_not_writable_is_one_sentence(
    stopped: Path, command: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, who may write anywhere: the system call fails instead."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder, "_LOCKS", stopped / "none")
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(RunError) as caught:
        command(stopped)
    assert str(caught.value) == (
        f"{stopped} must be writable to change the run there, and it is not: Permission denied. "
        f"Give the command on the machine, and as the user, that trains it."
    )


def test_a_link_is_not_written_through(stopped: Path) -> None:
    (stopped / "requests.jsonl").symlink_to(stopped.parent / "elsewhere")
    with pytest.raises(RunError, match="must be writable to change the run"):
        request_settings(stopped, ["l2.weight=1"])
    assert not (stopped.parent / "elsewhere").exists()


def test_a_run_that_failed_at_its_start_leaves_no_requests(folder: Path) -> None:
    run = RunFolder(folder / "r")
    with run.locked():
        run.begin(small_config(folder))
        request_settings(run.path, ["l2.weight=1"])
        run.discard_start()
    assert not run.requests.exists()


def test_a_request_on_a_full_disk_is_refused_and_does_not_spoil_the_next(stopped: Path) -> None:
    request_settings(stopped, ["l2.weight=0.5"])
    requests = RunFolder(stopped).requests
    whole = requests.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, before[1]))  # as a full disk
    try:
        with pytest.raises(RunError, match=r"must take a line of \d+ bytes, and took 10: the disk"):
            request_settings(stopped, ["l2.weight=0.6"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(requests.read_bytes()) == len(whole) + 10
    assert describe_settings(stopped)["l2.weight"] == 0.5
    request_settings(stopped, ["l2.weight=0.7"])
    assert describe_settings(stopped)["l2.weight"] == 0.7


def test_a_damaged_request_is_named_and_passed_over(folder: Path) -> None:
    lines = ["[" * 100_000, '{"set": {"l2.weight": 0.5}}', "", "rubbish", "{}"]
    config = small_config(folder, "train.steps=3")
    train(config, folder / "r", stop=stop_after(1))
    (folder / "r" / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines))
    request_settings(folder / "r", ["learning_rate=0.5"])
    recorder = Recorder()
    resume(folder / "r", watch=recorder)
    assert weights(folder / "r", "l2") == [0.1, 0.5, 0.5]
    said = [text for text in recorder.messages if "is no request" in text]
    assert said == [
        f"step 1: line {number} of requests.jsonl is no request: left out" for number in (1, 4, 5)
    ]


def test_many_requests_are_checked_at_once(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as none is invalid; else one by one, and those that are left hold."""
    requests = RunFolder(stopped).requests
    lines = [json.dumps({"set": {"l2.weight": number / 10}}) for number in range(300)]
    requests.write_text("".join(f"{line}\n" for line in lines))
    checked: list[Any] = []
    validate = Config.model_validate

    def count(raw: Any) -> Config:
        checked.append(raw)
        return validate(raw)

    monkeypatch.setattr(Config, "model_validate", count)
    assert describe_settings(stopped)["l2.weight"] == 29.9
    assert len(checked) == 1
    with requests.open("a") as file:
        file.write('{"set": {"l2.weight": -1}}\n')
    assert describe_settings(stopped)["l2.weight"] == 29.9
