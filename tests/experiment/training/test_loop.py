"""The training loop: steps, evaluations, interruption and resume. Kills are in `tests/cli`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from steelyard import BaseLossOutput, CustomLossOutput, RegularizerOutput
from steelyard.errors import CheckpointError, ConfigError, InputError, RunError, TermError
from steelyard.experiment import RunFolder, resume, train
from steelyard.output.step_metrics import space_metrics
from tests.experiment.small_runs import (
    DRIFT,
    KL,
    L2,
    STEADY,
    Recorder,
    detached,
    drawing,
    failing,
    from_logits,
    noise,
    small_config,
    stop_after,
    term,
    without_clock,
)


def test_a_run_writes_its_metrics_its_result_and_its_samples(folder: Path) -> None:
    prompts = ("train.sample_prompts=['One']", "train.sample_tokens=2")
    recorder = Recorder()
    outcome = train(small_config(folder, *prompts), folder / "r", watch=recorder)
    run = RunFolder(folder / "r")
    assert (outcome.status, outcome.steps, outcome.folder) == ("done", 3, run.path)
    assert run.metrics() == recorder.steps
    assert recorder.steps[-1] == outcome.metrics
    assert [line["step"] for line in run.metrics()] == [0, 1, 2]
    for line in run.metrics():
        expected = line["base_loss/value"] + 0.1 * line["regularizers/l2/value"]
        assert line["loss_total"] == pytest.approx(expected, rel=1e-5)
    result = run.result()
    assert result is not None
    assert result["metrics"] == outcome.metrics
    assert result["seconds"] == pytest.approx(sum(line["seconds"] for line in run.metrics()))
    samples = [(s["when"], s["step"], s["prompt"]) for s in run.samples()]
    assert samples == [("before", 0, "One"), ("after", 3, "One")]
    assert recorder.messages[0] == "loading tiny-random (local)"
    assert recorder.messages[-1] == "done after 3 steps"
    log = (run.path / "log.txt").read_text()
    assert all(message in log for message in recorder.messages)


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 4]), (2, [0, 2, 4]), (3, [0, 3, 4])])
def test_held_out_data_are_evaluated_first_last_and_in_between(
    folder: Path, every: int, steps: list[int]
) -> None:
    overrides = ("train.steps=5", f"train.evaluate_every={every}", "train.learning_rate=1e-3")
    train(small_config(folder, *overrides), folder / "r")
    lines = RunFolder(folder / "r").metrics()
    assert [line["step"] for line in lines if "held_out/loss" in line] == steps
    assert lines[-1]["held_out/loss"] < lines[0]["held_out/loss"]


@pytest.mark.parametrize(("save_every", "steps"), [(1, 2), (0, 2), (2, 3)])
def test_an_interrupted_run_is_resumed_to_the_same_bits(
    folder: Path, save_every: int, steps: int
) -> None:
    config = small_config(
        folder, "train.steps=4", f"train.save_every={save_every}", "train.evaluate_every=1",
        regularizers=[L2, DRIFT, STEADY, term(noise), term(from_logits, needs=["logits"])],
    )  # fmt: skip
    train(config, folder / "whole")
    outcome = train(config, folder / "r", stop=stop_after(steps))
    assert (outcome.status, outcome.steps) == ("interrupted", steps)
    assert RunFolder(folder / "r").result() is None
    recorder = Recorder()
    assert resume(folder / "r", watch=recorder).status == "done"
    assert [line["step"] for line in recorder.steps] == list(range(steps, 4))
    whole, resumed = (RunFolder(folder / name).metrics() for name in ("whole", "r"))
    assert [without_clock(line) for line in resumed] == [without_clock(line) for line in whole]
    assert len([key for key in whole[-1] if key.startswith("held_out/regularizers/")]) == 5


def test_terms_that_draw_have_the_same_numbers_twice_and_resumed_wherever_they_run(
    folder: Path,
) -> None:
    def run_of(name: str, places: tuple[str, ...], steps: int | None = None) -> list[Any]:
        terms = [
            term(function, name=f"{function.__name__}{index}", run_in=place)
            for index, place in enumerate(places)
            for function in (noise, drawing)
        ]
        overrides = ("train.steps=4", "train.gradient_accumulation_steps=2")
        config = small_config(folder, *overrides, regularizers=terms)
        if steps is not None:
            train(config, folder / name, stop=stop_after(steps))
            resume(folder / name)
        else:
            train(config, folder / name)
        return [without_clock(line) for line in RunFolder(folder / name).metrics()]

    expected = run_of("inline", ("inline", "inline", "inline"))
    values = [
        line[f"regularizers/{name}{index}/value"]
        for line in expected
        for name in ("noise", "drawing")
        for index in range(3)
    ]
    assert len(set(values)) == len(values)
    assert run_of("auto", ("auto", "auto", "auto")) == expected
    assert run_of("resumed", ("thread", "process", "auto"), steps=2) == expected


def test_a_random_aggregator_is_resumed_to_the_same_bits(folder: Path) -> None:
    config = small_config(
        folder, "train.steps=4", "train.save_every=2", "loss.aggregate.use=random",
        regularizers=[L2, term(noise), {**STEADY, "anchor": True}],
    )  # fmt: skip
    train(config, folder / "whole")
    train(config, folder / "r", stop=stop_after(2))
    assert resume(folder / "r").status == "done"
    whole, resumed = (RunFolder(folder / name).metrics() for name in ("whole", "r"))
    assert [without_clock(line) for line in resumed] == [without_clock(line) for line in whole]
    assert whole[-1]["factors/steady"] == 1.0
    assert len({line["factors/l2"] for line in whole}) == 4


@pytest.mark.parametrize(
    ("override", "steps"),
    [
        ("train.drivers_every=2", [0, 2, 4, 5]),
        ("train.drivers_every=0", []),
        ("train.track_grad_norms=false", []),
        ("train.batch_size=2", [0, 5]),  # the default: at least ten steps
    ],
)
def test_drivers_are_recorded_at_some_steps(folder: Path, override: str, steps: list[int]) -> None:
    train(small_config(folder, "train.steps=6", override), folder / "r")
    records = RunFolder(folder / "r").drivers()
    assert [(r["step"], r["term"]) for r in records] == [
        (step, name) for step in steps for name in ("base", "l2")
    ]


def test_by_default_a_tenth_of_the_run_lies_between_drivers(folder: Path) -> None:
    config = small_config(folder, "train.steps=130", "train.save_every=0", "train.batch_size=1")
    train(config, folder / "r", stop=stop_after(40))
    steps = sorted({record["step"] for record in RunFolder(folder / "r").drivers()})
    assert steps == [0, 13, 26, 39]


@pytest.mark.parametrize("torn", [b"", b'{"step": 3, "ter'])
def test_the_drivers_of_a_resumed_run_are_those_of_an_uninterrupted_one(
    folder: Path, torn: bytes
) -> None:
    overrides = ("train.steps=4", "train.drivers_every=1")
    config = small_config(folder, *overrides, regularizers=[L2, DRIFT])
    train(config, folder / "whole")
    train(config, folder / "r", stop=stop_after(3))
    # As if killed after step 2 had written its drivers, and before its checkpoint.
    (folder / "r" / "checkpoints" / "step-00000003.json").unlink()
    with (folder / "r" / "drivers.jsonl").open("ab") as file:
        file.write(torn)
    assert resume(folder / "r").status == "done"
    whole, resumed = ((folder / run / "drivers.jsonl").read_bytes() for run in ("whole", "r"))
    assert whole == resumed
    assert whole.count(b"\n") == 4 * 3 - 1  # at step 0 there is no drift yet


def test_steps_after_the_last_checkpoint_are_repeated(folder: Path) -> None:
    config = small_config(folder, regularizers=[term(noise)])
    train(config, folder / "r", stop=stop_after(2))
    run = RunFolder(folder / "r")
    expected = [without_clock(line) for line in run.metrics()]
    (run.checkpoints / "step-00000002.json").unlink()  # as if killed before the second checkpoint
    recorder = Recorder()
    resume(folder / "r", watch=recorder)
    assert [line["step"] for line in recorder.steps] == [1, 2]
    assert [without_clock(line) for line in run.metrics()[:2]] == expected


def test_the_error_of_a_damaged_checkpoint_says_how_to_go_on_from_an_older_one(
    folder: Path,
) -> None:
    train(small_config(folder), folder / "r", stop=stop_after(2))
    run = RunFolder(folder / "r")
    newest = run.checkpoints / "step-00000002.json"
    whole = newest.read_text()
    for damaged in ("{", whole.replace("step-00000002", "step-00000009")):
        newest.write_text(damaged)
        with pytest.raises(CheckpointError) as caught:
            resume(folder / "r")
        assert caught.value.__notes__ == [f"To go on from the one before it, delete {newest}."]
    newest.unlink()
    assert resume(folder / "r").steps == 3


def test_a_run_without_a_checkpoint_says_that_it_begins_again(folder: Path) -> None:
    train(small_config(folder), folder / "r", stop=stop_after(2))
    shutil.rmtree(folder / "r" / "checkpoints")
    with (folder / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')  # as if killed while it was written
    recorder = Recorder()
    assert resume(folder / "r", watch=recorder).steps == 3
    assert recorder.messages.count("no checkpoint to go on from: beginning at the first step") == 1
    fresh = Recorder()
    train(small_config(folder), folder / "fresh", watch=fresh)
    assert not [text for text in fresh.messages if "no checkpoint" in text]


def test_a_finished_run_is_not_trained_again(folder: Path) -> None:
    done = train(small_config(folder, "train.steps=1"), folder / "r")
    recorder = Recorder()
    assert resume(folder / "r", watch=recorder) == done
    assert (recorder.messages, recorder.steps) == ([], [])
    with pytest.raises(RunError, match="must be empty or new, and it holds a run"):
        train(small_config(folder, "train.steps=1"), folder / "r")


def test_a_run_that_is_stopped_at_once_has_no_metrics(folder: Path) -> None:
    outcome = train(small_config(folder), folder / "r", stop=lambda: True)
    assert (outcome.status, outcome.steps, outcome.metrics) == ("interrupted", 0, {})
    assert not list((folder / "r" / "checkpoints").glob("step-*.json"))


def test_the_learning_rate_follows_its_schedule(folder: Path) -> None:
    # With a rate of 0 after the first step, held-out loss stays where that step left it.
    overrides = ("train.learning_rate={piecewise = {0 = 0.01, 1 = 0.0}}", "train.evaluate_every=1")
    train(small_config(folder, *overrides, "train.steps=4"), folder / "r")
    lines = RunFolder(folder / "r").metrics()
    assert [line["optim/learning_rate"] for line in lines] == [0.01, 0.0, 0.0, 0.0]
    assert all(line["optim/unclipped_grad_l2:mean"] > 0 for line in lines)
    first, *rest = [line["held_out/loss"] for line in RunFolder(folder / "r").metrics()]
    assert len(set(rest)) == 1
    assert rest[0] != first


def test_the_second_step_has_the_second_rate_of_the_schedule(folder: Path) -> None:
    overrides = ("train.learning_rate={piecewise = {0 = 0.0, 1 = 0.01}}", "train.evaluate_every=1")
    train(small_config(folder, *overrides, "train.steps=2"), folder / "r")
    base, trained = (line["held_out/loss"] for line in RunFolder(folder / "r").metrics())
    assert trained != base


def test_a_failing_term_ends_the_run_and_is_logged(folder: Path) -> None:
    with pytest.raises(TermError, match="the knowledge base is down"):
        train(small_config(folder, regularizers=[term(failing)]), folder / "r")
    log = (folder / "r" / "log.txt").read_text()
    assert "failed: TermError: regularizer 'failing' failed: RuntimeError: the knowledge" in log


def test_a_skipped_term_is_logged_with_its_reason(folder: Path) -> None:
    entry = term(failing, on_error="skip")
    recorder = Recorder()
    train(small_config(folder, "train.steps=2", regularizers=[entry]), folder / "r", watch=recorder)
    for step, line in enumerate(recorder.steps):
        assert line["skipped/failing"] == 1
        assert line["skipped/failing/reason"].endswith("RuntimeError: the knowledge base is down")
        assert f"step {step}: failing was skipped: {line['skipped/failing/reason']}" in (
            recorder.messages
        )


def picky(data: Any, _: Any) -> float:
    last = len(data) - 1
    raise InputError(f"datum {last} must have a label, got none.", datum=last)


def stale(_: Any, __: Any) -> float:
    raise KeyError("data[0] of the judge's cache is stale, and so is datum 1")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_datum_that_a_term_refuses_is_named_by_its_line(folder: Path, on_error: str) -> None:
    entry = {"use": f"{__name__}:picky", "name": "picky", "weight": 0.1, "on_error": on_error}
    config = small_config(folder, "train.steps=1", regularizers=[entry])
    recorder = Recorder()
    try:
        train(config, folder / "r", watch=recorder)
        message = recorder.steps[0]["skipped/picky/reason"]
    except TermError as error:
        message = str(error)
    found = re.search(
        r"InputError: datum 1 must have a label, got none\. \(Datum 1 is line (\d+) of train\.jsonl"
        r"\.\)$",
        message,
    )
    assert found is not None, message
    assert 1 <= int(found[1]) <= 12


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_the_text_of_the_user_stays_as_it_is(folder: Path, on_error: str) -> None:
    entry = {"use": f"{__name__}:stale", "name": "stale", "weight": 0.1, "on_error": on_error}
    config = small_config(folder, "train.steps=1", regularizers=[entry])
    recorder = Recorder()
    try:
        train(config, folder / "r", watch=recorder)
        messages = [recorder.steps[0][f"{part}skipped/stale/reason"] for part in ("", "held_out/")]
    except TermError as error:
        messages = [str(error).removeprefix("regularizer 'stale' failed: ")]
    expected = 'KeyError: "data[0] of the judge\'s cache is stale, and so is datum 1"'
    assert set(messages) == {expected}


def test_a_term_without_a_held_out_value_is_reported_once_and_counted(folder: Path) -> None:
    entry = term(failing, on_error="skip", every=9)
    recorder = Recorder()
    overrides = ("train.steps=3", "train.evaluate_every=1")
    train(small_config(folder, *overrides, regularizers=[entry]), folder / "r", watch=recorder)
    reasons = [line["held_out/skipped/failing/reason"] for line in recorder.steps]
    assert [line["held_out/skipped/failing"] for line in recorder.steps] == [1.0] * 3
    said = [text for text in recorder.messages if "held-out value" in text]
    assert said == [f"failing has no held-out value: {reasons[0]}"]
    assert reasons[0].endswith("RuntimeError: the knowledge base is down")


@pytest.mark.filterwarnings("default::steelyard.DetachedTermWarning")
def test_warnings_are_messages(folder: Path) -> None:
    recorder = Recorder()
    config = small_config(folder, "train.steps=2", regularizers=[term(detached)])
    train(config, folder / "r", watch=recorder)
    warned = [text for text in recorder.messages if text.startswith("DetachedTermWarning: ")]
    assert len(warned) == 1


def test_a_config_that_cannot_be_built_leaves_no_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\[model\]: base_model must be"):
        train(small_config(folder, "model.base_model=gpt-9"), folder / "r")
    with pytest.raises(ConfigError, match=r"#1: use: "):
        train(small_config(folder, regularizers=[{"use": "l9", "weight": 1}]), folder / "r")
    assert not (folder / "r").exists()


def test_a_folder_without_a_run_cannot_be_resumed(folder: Path) -> None:
    with pytest.raises(RunError, match="must be the folder of a run"):
        resume(folder / "none")


def test_the_config_is_written_with_every_default(folder: Path) -> None:
    config = small_config(folder)
    train(config, folder / "r", stop=lambda: True)
    written = json.loads((folder / "r" / "config.json").read_text())
    assert written == config.model_dump(mode="json")
    assert written["train"]["grad_clip_norm"] == 0


def test_space_metrics_are_those_of_terms_with_a_norm() -> None:
    terms = {
        "kl": RegularizerOutput("kl", 1.0, 1.0, 1.0, grad_norm=1.0),
        "rare": RegularizerOutput("rare", 1.0, 1.0, 1.0, grad_norm=1.0, grad_space="logits"),
        "judge": RegularizerOutput("judge", 1.0, 1.0, 1.0),
    }
    base = BaseLossOutput(1.0, grad_norm=1.0)
    assert space_metrics(CustomLossOutput(1.0, base, terms, grad_space="parameters")) == {
        "base_loss/grad_space": "parameters",
        "regularizers/kl/grad_space": "logprobs",
        "regularizers/rare/grad_space": "logits",
    }


def test_gradients_with_respect_to_the_parameters(folder: Path) -> None:
    settings = ("steps=4", "grad_space=parameters", "track_every=2", "measure_progress=3")
    overrides = [f"train.{setting}" for setting in settings]
    terms = [L2, KL, term(from_logits, needs=["logits"])]
    config = small_config(folder, *overrides, regularizers=terms)
    train(config, folder / "r")
    lines = RunFolder(folder / "r").metrics()
    assert len(lines) == 4
    names = [spec.name for spec in config.regularizers]
    for line in lines:
        tracked, measured = line["step"] % 2 == 0, line["step"] % 3 == 0
        spaces = {key: value for key, value in line.items() if key.endswith("/grad_space")}
        assert set(spaces.values()) == ({"parameters"} if tracked else set())
        assert ("total_grad_norm" in line) == tracked
        if tracked:
            # The norm of the gradient that the optimizer saw.
            norm = line["optim/unclipped_grad_l2:mean"]
            assert line["total_grad_norm"] == pytest.approx(norm, rel=1e-4)
        progress = [key for key in line if key.endswith("/progress")]
        wanted = ["base_loss/progress", *(f"regularizers/{name}/progress" for name in names)]
        assert progress == (wanted if measured else [])
