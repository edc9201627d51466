"""Where terms and rewards of the user's own failed: file and line, and the traceback in the log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelyard import telemetry
from steelyard.errors import TermError
from steelyard.experiment import RunFolder, read_config, train
from steelyard.experiment.run.log import RunLog
from tests.experiment.small_runs import Recorder, small_config, write_data


def fails_on_zero(data: Any, logprobs: list[Tensor]) -> Tensor:
    1 / 0  # noqa: B018 - line 2 of the function
    return torch.cat(logprobs).sum()


def failing_reward(record: Mapping[str, Any], answer: str) -> float:
    return float(record["missing"])


class UnpicklableProblem(Exception):  # noqa: N818 - of a user
    def __init__(self, a: int, b: int) -> None:
        super().__init__("odd")


def raises_unpicklable(data: Any, logprobs: list[Tensor]) -> Tensor:
    raise UnpicklableProblem(1, 2)


def place_of(fn: Any, offset: int = 1) -> str:
    return f"{__file__}, line {fn.__code__.co_firstlineno + offset}"


def frame_of(fn: Any) -> str:
    return f'File "{__file__}", line {fn.__code__.co_firstlineno + 1}'


@pytest.mark.parametrize("fn", [fails_on_zero, raises_unpicklable])
@pytest.mark.parametrize("run_in", ["inline", "process"])
def test_a_term_that_ends_the_run_is_placed_wherever_it_runs(
    folder: Path, run_in: str, fn: Any
) -> None:
    entry = {"use": f"{__name__}:{fn.__name__}", "name": "own", "weight": 1.0, "run_in": run_in}
    config = small_config(folder, "data.held_out=0", regularizers=[entry])
    with pytest.raises(TermError) as caught:
        train(config, folder / "r")
    log = folder / "r" / "log.txt"
    lines, where = caught.value.__notes__
    code = Path(__file__).read_text().splitlines()[fn.__code__.co_firstlineno].strip()
    assert lines == f"  {frame_of(fn)}, in {fn.__name__}\n    {code}"
    assert where == f"The whole traceback is in {log}."
    assert log.read_text().count("was the direct cause of") == 1, "the traceback, once"


@pytest.mark.parametrize("run_in", ["inline", "process"])
def test_a_skipped_term_and_its_held_out_value_are_placed_once(folder: Path, run_in: str) -> None:
    entry = {"use": f"{__name__}:fails_on_zero", "name": "own", "weight": 1.0, "run_in": run_in}
    config = small_config(folder, "train.steps=2", regularizers=[{**entry, "on_error": "skip"}])
    recorder = Recorder()
    train(config, folder / "r", watch=recorder)
    log = folder / "r" / "log.txt"
    said = f"regularizer 'own' failed at {place_of(fails_on_zero)}; the whole traceback is in {log}"
    assert recorder.messages.count(said) == 1
    assert log.read_text().count("was the direct cause of") == 1
    assert telemetry.list_handlers("steelyard.regularizer") == []


@pytest.mark.parametrize("run_in", ["thread", "process"])
@pytest.mark.parametrize("on_error", ["drop", "raise"])
def test_a_failing_reward_is_placed(folder: Path, run_in: str, on_error: str) -> None:
    write_data(folder / "prompts.jsonl", [{"prompt": f"{n}"} for n in range(4)])
    reward = {"use": f"{__name__}:failing_reward", "name": "own"}
    sound = {"use": "valid_json", "name": "json"}
    raw = {
        "model": {"base_model": "tiny-random", "rank": 2, "device": "cpu"},
        "rollouts": {"prompts": "prompts.jsonl", "per_step": 1, "group_size": 2, "max_tokens": 2},
        "rewards": [{**reward, "run_in": run_in, "on_error": on_error, "enabled": False}, sound],
        "train": {"steps": 1},
    }
    config, recorder = read_config(raw, folder=folder), Recorder()
    log = folder / "r" / "log.txt"
    if on_error == "raise":
        with pytest.raises(TermError) as caught:
            train(config, folder / "r", watch=recorder)
        assert f"{frame_of(failing_reward)}, in failing_reward" in caught.value.__notes__[0]
    else:
        train(config, folder / "r", watch=recorder)
        found = [text for text in recorder.messages if "failed at" in text]
        assert found == [
            f"reward 'own' failed at {place_of(failing_reward)}; the whole traceback is in {log}"
        ]
    assert "in failing_reward\n" in log.read_text()


def test_failures_of_others_are_not_logged(run: RunFolder) -> None:
    recorder = Recorder()
    RunLog(run, recorder).record("regularizer 'x'", TermError("timed out", term="x"))
    assert recorder.messages == []
