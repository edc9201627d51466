"""Evaluation functions of the user: what they receive, what they return, and how they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.errors import ConfigError, TermError, TermResultError
from steelyard.experiment import RunFolder, train
from steelyard.experiment.training.evaluations import Evaluation
from tests.experiment.small_runs import Recorder, small_config, small_rollouts

HERE = __name__


def nll(evaluation: Evaluation) -> float:
    """Cross-entropy per token of the held-out data, as `held_out/loss` is."""
    weights = [d.loss_fn_inputs["weights"].to_torch() for d in evaluation.data]
    logprobs = evaluation.logprobs()
    total = sum((row * w).sum() for row, w in zip(logprobs, weights, strict=True))
    return -float(total) / float(sum(w.sum() for w in weights))


async def answers(evaluation: Evaluation, tokens: int = 2) -> Mapping[str, Any]:
    """Lengths of greedy answers to the held-out lines, as records and as texts."""
    await asyncio.sleep(0)
    of_records = evaluation.sample(evaluation.records, max_tokens=tokens)
    texts = [record["prompt"] for record in evaluation.records]
    again = evaluation.sample(texts, max_tokens=tokens)
    return {
        "records": len(evaluation.records),
        "same": of_records == again,
        "longest": torch.tensor(max(map(len, of_records))),
    }


def broken(evaluation: Evaluation) -> float:
    return 1 / (evaluation.step - evaluation.step)


def wordy(evaluation: Evaluation) -> Any:
    return "good"


def two(evaluation: Evaluation, other: Any) -> float:
    return 0.0


not_a_function = 3


def use(function: str, **keys: Any) -> str:
    more = "".join(f", {key} = {value}" for key, value in keys.items())
    return f"evaluations=[{{ use = '{HERE}:{function}'{more} }}]"


def test_an_evaluation_sees_the_held_out_data_and_the_model(folder: Path) -> None:
    train(small_config(folder, "train.steps=4", "train.evaluate_every=2", use("nll")), folder / "r")
    lines = RunFolder(folder / "r").metrics()
    assert [line["step"] for line in lines if "eval/nll" in line] == [0, 2, 3]
    for line in lines:
        if "eval/nll" in line:
            assert line["eval/nll"] == pytest.approx(line["held_out/loss"], rel=1e-5)


def test_an_async_evaluation_samples_and_returns_several_numbers(folder: Path) -> None:
    entry = use("answers", name="'a'", options="{ tokens = 3 }")
    train(small_config(folder, entry), folder / "r")
    line = RunFolder(folder / "r").metrics()[0]
    assert (line["eval/a/records"], line["eval/a/same"]) == (2.0, 1.0)
    assert line["eval/a/longest"] <= 3


def test_an_evaluation_of_a_run_with_rollouts_sees_its_prompts(folder: Path) -> None:
    train(small_rollouts(folder, use("answers")), folder / "r")
    assert RunFolder(folder / "r").metrics()[0]["eval/answers/records"] == 1.0


def test_a_failure_names_the_file_and_the_line(folder: Path) -> None:
    with pytest.raises(TermError) as caught:
        train(small_config(folder, use("broken")), folder / "r")
    assert str(caught.value) == ("evaluation 'broken' failed: ZeroDivisionError: division by zero")
    code, where = caught.value.__notes__
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "1 / (" in text
    )
    assert f'File "{__file__}", line {line}, in broken' in code
    assert where == f"The whole traceback is in {folder / 'r' / 'log.txt'}."
    assert "in broken" in (folder / "r" / "log.txt").read_text()


def test_a_failure_can_be_skipped(folder: Path) -> None:
    recorder = Recorder()
    config = small_config(folder, use("broken", on_error="'skip'"))
    train(config, folder / "r", watch=recorder)
    assert (
        "step 0: evaluation 'broken' failed: ZeroDivisionError: division by zero"
        in recorder.messages
    )
    assert not any(key.startswith("eval/") for key in recorder.steps[0])


def test_what_is_no_number_is_refused(folder: Path) -> None:
    with pytest.raises(TermResultError) as caught:
        train(small_config(folder, use("wordy")), folder / "r")
    assert str(caught.value) == (
        "evaluation 'wordy' must return a number, or a mapping of names to numbers, "
        "got 'good' (str)."
    )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (use("nowhere"), "[[evaluations]] #1: use: "),
        ("evaluations=[{ use = 'nll' }]", "[[evaluations]] #1: use must be 'package.module:attr'"),
        (use("not_a_function"), "[[evaluations]] #1: an evaluation must be a function"),
        (use("two"), "[[evaluations]] #1: an evaluation must be a function"),
        (use("nll", options="{ a = 1 }"), "[[evaluations]] #1: an evaluation must be a function"),
        (
            f"evaluations=[{{ use = '{HERE}:nll' }}, {{ use = '{HERE}:nll' }}]",
            "[[evaluations]] #2: name must be unique, and 'nll' stands twice: give it another",
        ),
    ],
)
def test_evaluations_are_checked_before_the_model_is_loaded(
    folder: Path, entries: str, message: str
) -> None:
    recorder = Recorder()
    with pytest.raises(ConfigError) as caught:
        train(small_config(folder, entries), folder / "r", watch=recorder)
    assert str(caught.value).startswith(message)
    assert recorder.messages == []
    assert not (folder / "r").exists()
